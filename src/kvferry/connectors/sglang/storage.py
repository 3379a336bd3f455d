"""A HiCache storage back end, loaded by SGLang through its module path.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvferry", "interface_v1": 1,
        "module_path": "kvferry.connectors.sglang.storage", "class_name": "KvferryStorage",
        "disk": "/mnt/nvme/kvferry", "disk_size": "500GiB"}'
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from kvferry.config import Config
from kvferry.connectors.common.storage import JobId, Storage, StorageJob
from kvferry.core.identity import Namespace, store_fingerprint
from kvferry.core.keys import Keys
from kvferry.errors import ConfigError, KvferryError
from kvferry.tiers.contract import Addresses, TierSetup
from kvferry.types import TierName

log = logging.getLogger(__name__)

_PERSON = b"kvferry sglang\0\0"
_POLL_SECONDS = 0.0005
_OURS = ("backend_name", "module_path", "class_name", "interface_v1", "revision")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_SERVER_ARGS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
"""Arguments of the server that change the bytes of a page."""


class KvferryStorage(HiCacheStorage):  # type: ignore[misc]
    """Translates HiCache's interface (version 1) to :class:`Storage`. One page is one block.

    Owns the storage, not the host pool. HiCache calls it from several threads, each of which waits
    for its own pages. Stays out of service, with a warning, where it cannot tell which weights
    the server runs: it must not share pages then.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        """Read the settings; ConfigError where one is wrong or no tier is named."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError('kvferry needs "interface_v1": 1 in the storage back end\'s config')
        self._revision = str(extra.get("revision", ""))
        settings = {name: value for name, value in extra.items() if name not in _OURS}
        self._config = Config.load(
            overrides=settings, source="--hicache-storage-backend-extra-config"
        )
        if not (self._config.disk or self._config.remote):
            raise ConfigError("kvferry as a HiCache storage back end needs disk or remote")
        self._parallel = storage_config
        self._storage: Storage | None = None
        self._lock = threading.Lock()
        self._ended: dict[JobId, StorageJob] = {}
        self.idle_reason = "the host pool is not registered yet"
        """Why nothing is stored or found; empty while in service."""

    # -- called by HiCache's controller ---------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for this host pool."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self.idle_reason = self._open(mem_pool_host)
        if self.idle_reason:
            log.warning("kvferry is idle: %s", self.idle_reason)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded; waits for a shared store's answer, within bounds.

        Their first is evicted last.
        """
        storage = self._storage
        if storage is None or not keys:
            return 0
        names = _keys(keys)
        end = time.monotonic() + self._config.lookup_deadline
        while True:
            with self._lock:
                ready, unknown = storage.lookup(names)
                count = int(ready.argmin()) if not ready.all() else len(ready)
                if count == len(keys) or not unknown[count] or time.monotonic() >= end:
                    storage.touch(_keys(list(keys[:count])[::-1]))
                    return count
                self._collect(storage)
            time.sleep(_POLL_SECONDS)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool; for each, whether it came up whole."""
        return self._move("load", keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; for each, whether it is stored now."""
        return self._move("store", keys, host_indices)

    def clear(self) -> None:
        """Forget every page, also for later servers."""
        if self._storage is not None:
            with self._lock:
                self._storage.reset()

    def close(self) -> None:
        """Finish what is under way and close the tiers."""
        storage, self._storage = self._storage, None
        if storage is not None:
            with self._lock:
                storage.close()

    # The interface before version 1, which HiCache does not use with it.

    def exists(self, key: str) -> bool:
        """Whether one page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not available: pages go to the host pool directly."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> None:
        """Not available: pages go to the host pool directly."""

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not available: pages come from the host pool directly."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Not available: pages come from the host pool directly."""
        return False

    # -- inside ---------------------------------------------------------------------------------

    def _open(self, pool: Any) -> str:
        """Open the tiers; returns why that cannot be done, or nothing."""
        try:
            args = _server_args()
            revision = self._revision or weights_of(args)
            if not revision:
                return (
                    "it cannot tell which weights the server runs, so it must not share pages; "
                    'give "revision" in --hicache-storage-backend-extra-config'
                )
            if self._parallel.is_mla_model and self._parallel.tp_size > 1 and self._config.disk:
                return (
                    "with MLA one rank writes for all, and a disk store serves one process; use "
                    "remote, or one GPU"
                )
            sizes, regions = _geometry(pool)
            setup = _setup(self._parallel, pool, args, revision, sizes)
            self._storage = Storage(self._config, setup, sizes, regions, pool.kv_buffer)
        except ConfigError:
            raise
        except (KvferryError, OSError) as error:
            return str(error)
        return ""

    def _move(self, verb: str, keys: list[str], host_indices: Any) -> list[bool]:
        storage = self._storage
        if storage is None or not keys:
            return [False] * len(keys)
        with self._lock:
            job_id = getattr(storage, verb)(_keys(keys), self._addresses(host_indices, len(keys)))
        while True:  # every tier ends a batch by its own deadline, and then touches no memory
            with self._lock:
                self._collect(storage)
                job = self._ended.pop(job_id, None)
            if job is not None:
                return [bool(ok) for ok in job.ok]
            time.sleep(_POLL_SECONDS)

    def _collect(self, storage: Storage) -> None:
        self._ended.update((job.id, job) for job in storage.poll())

    def _addresses(self, host_indices: Any, num_pages: int) -> Addresses:
        pointers, _ = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return np.array(pointers, dtype=np.int64).reshape(num_pages, -1)


def weights_of(args: Any) -> str:
    """What tells the server's weights apart from others; empty if nothing reliable does.

    The commit of a model from a hub, or a digest over the names, sizes and times of the weight
    files in a local folder and over its configuration.
    """
    if args is None or str(getattr(args, "load_format", "")) == "dummy":
        return ""
    path = str(getattr(args, "model_path", "") or "")
    revision = str(getattr(args, "revision", "") or "")
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(path, "config.json", revision=revision or None)
        except ValueError:  # no name of a model on a hub
            return ""
        commit = _COMMIT.search(str(cached or ""))
        return commit[1] if commit else ""
    if commit := _COMMIT.search(str(folder.resolve())):
        return commit[1]
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    config = folder / "config.json"
    if not files or not config.is_file():
        return ""
    digest = blake2b(config.read_bytes(), digest_size=16)
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _server_args() -> Any:
    """The arguments of the server that this process belongs to; None outside of one."""
    try:
        from sglang.srt.runtime_context import get_server_args  # 0.5.23
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AssertionError):
        return None


def _keys(keys: Sequence[str]) -> Keys:
    return Keys.from_bytes(
        blake2b(key.encode(), digest_size=32, person=_PERSON).digest() for key in keys
    )


def _geometry(pool: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """The sizes of a page's pieces, and where the host pool's memory lies."""
    import torch

    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]
    return list(sizes), [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]


def _setup(
    parallel: HiCacheStorageConfig, pool: Any, args: Any, revision: str, sizes: Sequence[int]
) -> TierSetup:
    """What decides a page's bytes on this rank: SGLang's configuration names only a part of it."""
    namespace = Namespace(
        model=parallel.model_name or str(getattr(args, "model_path", "")) or "unknown",
        revision=revision,
        dtype=str(pool.dtype),
        layout=f"sglang {pool.layout} {type(pool).__name__}",
        geometry={
            "layers": [int(pool.start_layer), int(pool.end_layer), int(pool.layer_num)],
            "pieces": [int(size) for size in sizes],
            "tp": [parallel.tp_size, parallel.should_split_heads],
            "pp": parallel.pp_size,
            "cp": [parallel.attn_cp_size, getattr(parallel, "dcp_size", 1)],
            "format": str(getattr(pool, "storage_format_tag", None)),
        },
        block_tokens=int(pool.page_size),
        overrides={name: str(getattr(args, name, None)) for name in _SERVER_ARGS},
    )
    # All ranks of MLA hold the same pages.
    tp_rank = 0 if parallel.is_mla_model else parallel.tp_rank
    ranks = (tp_rank, parallel.pp_rank, parallel.attn_cp_rank, getattr(parallel, "dcp_rank", 0))
    engine = getattr(parallel, "dp_rank", 0)
    nodes = max(1, int(getattr(args, "nnodes", 1) or 1))
    num_ranks = parallel.tp_size * parallel.pp_size * parallel.attn_cp_size
    return TierSetup(
        TierName(""),
        sum(sizes),
        num_ranks_here=max(1, num_ranks // nodes),
        namespace=store_fingerprint(namespace, (*ranks, engine)),
        family=store_fingerprint(namespace, engine),
        label=namespace.model,
        shared_namespace=store_fingerprint(namespace, ranks),
    )
