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
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransferResult,
)

from kvferry.config import Config
from kvferry.connectors.common.storage import POLL_SECONDS, Flags, Storage, StorageJob, hashed_keys
from kvferry.core.identity import Namespace, store_fingerprint
from kvferry.core.keys import Keys
from kvferry.errors import ConfigError, KvferryError
from kvferry.tiers.contract import TierSetup
from kvferry.types import TierName

log = logging.getLogger(__name__)

_PERSON = b"kvferry sglang\0\0"
_KV = "kv"
_OURS = ("backend_name", "module_path", "class_name", "interface_v1", "revision")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_SERVER_ARGS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
"""Server arguments that change the bytes of a page."""


class _Pool(NamedTuple):
    """One of HiCache's host pools, and the storage of its pages."""

    host: Any
    storage: Storage


class KvferryStorage(HiCacheStorage):  # type: ignore[misc]
    """Translates HiCache's interface (versions 1 and 2) to :class:`Storage`: a page is a block.

    Owns a storage for each host pool, not the pools. HiCache calls it from several threads, each of
    which waits for its own pages. If it cannot tell which weights the server runs, it must not
    share pages: it stays out of service, with a warning.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        """Read the settings; ConfigError if one is wrong or they name no tier."""
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
        self._hosts: dict[str, Any] = {}
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()
        self.idle_reason = "the host pool is not registered yet"
        """Why nothing is stored or found; empty while in service."""

    # -- called by HiCache's controller ---------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool of the attention layers; open no tier yet."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self._hosts = {_KV: mem_pool_host}
        if not hasattr(HiCacheStorage, "on_host_pools_registered"):  # an older SGLang
            self.on_host_pools_registered()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a host pool beside the first: of windows, recurrent states or indexers."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool is not self._hosts.get(_KV):
            self._hosts[str(host_pool_name)] = host_pool
            if self._pools:  # a late pool: the others are open already
                self._open(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Open the tiers for all host pools."""
        self.idle_reason = ""
        for name in self._hosts:
            if not self.idle_reason:
                self._open(name)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many leading pages can be loaded; wait for shared stores, within bounds.

        Counts as a use of these pages; the first of them is evicted last.
        """
        return self._leading(_KV, keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how many leading pages all pools can restore, and every shorter possible hit.

        A pool of windows or states has only the pages before the positions where requests stopped.
        """
        most = self._leading(_KV, keys)
        hits: dict[str, int] = {_KV: most} if most else {}
        stops = list(range(1, most + 1))
        for transfer in pool_transfers or ():
            name = str(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:  # never shortens the hit
                count = self._leading(name, transfer.keys or [])
                hit = count // max(1, transfer.group_pages) * transfer.block_pages
            elif not stops:
                break
            elif transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                hit = self._leading(name, keys[:most])
                stops = [stop for stop in stops if stop <= hit]
            else:
                window = max(1, len(transfer.keys or ()))
                ready = self._lookup(name, keys[:most])
                own = [n for n in range(1, most + 1) if ready[max(0, n - window) : n].all()]
                hit = max(own, default=0)
                stops = [stop for stop in stops if stop in own]
            if hit:
                hits[transfer.name] = hit
        return PoolTransferResult(stops[-1] if stops else 0, hits, stops)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool; return, for each, whether it was loaded whole."""
        return self._wait(self._begin("load", _KV, keys, host_indices), len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; return, for each, whether it is stored now."""
        return self._wait(self._begin("store", _KV, keys, host_indices), len(keys))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages of several pools; return, for each page, whether it was loaded whole."""
        return self._move("load", transfers)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; return, for each page, whether it is stored now."""
        return self._move("store", transfers)

    def clear(self) -> None:
        """Forget every page, so that later servers do not find it either."""
        with self._lock:
            for pool in self._pools.values():
                pool.storage.reset()

    def close(self) -> None:
        """Finish the copies under way and close the tiers."""
        with self._lock:
            pools, self._pools = self._pools, {}
            for pool in pools.values():
                pool.storage.close()

    # The interface before version 1, which HiCache does not use together with version 1.

    def exists(self, key: str) -> bool:
        """Whether one page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, *args: Any, **kwargs: Any) -> None:
        """Not available: pages go to the host pool directly."""

    def set(self, *args: Any, **kwargs: Any) -> bool:
        """Not available: pages come from the host pool directly."""
        return False

    batch_get, batch_set = get, set

    # -- inside ---------------------------------------------------------------------------------

    def _open(self, name: str) -> None:
        """Open the tiers of one pool, or set ``idle_reason`` if that is not possible."""
        host = self._hosts[name]
        try:
            args = _server_args()
            revision = self._revision or weights_of(args)
            if not revision:
                raise KvferryError(
                    "it cannot tell which weights the server runs, so it must not share pages; "
                    'give "revision" in --hicache-storage-backend-extra-config'
                )
            if self._parallel.is_mla_model and self._parallel.tp_size > 1 and self._config.disk:
                raise KvferryError(
                    "with MLA one rank writes for all, and a disk store serves one process; use "
                    "remote, or one GPU"
                )
            sizes = {  # bytes of a page's pieces, by pool
                each: list(pool.get_page_buffer_meta(torch.arange(pool.page_size))[1])
                for each, pool in self._hosts.items()
            }
            first, namespace = (
                _namespace(self._parallel, self._hosts[each], args, revision, sizes[each])
                for each in (_KV, name)
            )
            nodes = max(1, int(getattr(args, "nnodes", 1) or 1))
            setup = _setup(
                self._parallel, namespace, first, name, host, sum(sizes[name]), list(sizes), nodes
            )
            with self._lock:
                storage = Storage(self._config, setup, sizes[name], host)
                self._pools[name] = _Pool(host, storage)
        except ConfigError:
            raise
        except (KvferryError, OSError, NotImplementedError, ValueError) as error:
            self.idle_reason = f"{error}" if name == _KV else f"pool {name}: {error}"
            log.warning("kvferry is idle: %s", self.idle_reason)

    def _leading(self, name: str, keys: Sequence[str]) -> int:
        """Return how many leading pages of a pool can be loaded; the first is evicted last."""
        ready = self._lookup(name, keys, is_prefix=True)
        count = len(ready) if ready.all() else int(ready.argmin())
        if count and name in self._pools:
            with self._lock:
                self._pools[name].storage.touch(_keys(list(keys[:count])[::-1]))
        return count

    def _lookup(self, name: str, keys: Sequence[str], *, is_prefix: bool = False) -> Flags:
        """Return which pages can be loaded; ``is_prefix``: only up to the first missing one."""
        pool = self._pools.get(name)
        if pool is None or not keys:
            return np.zeros(len(keys), dtype=bool)
        names = _keys(keys)
        end = time.monotonic() + self._config.lookup_deadline
        while True:
            with self._lock:
                ready, unknown = pool.storage.lookup(names)
                missing = (~(ready | unknown)).nonzero()[0]
                stop = missing[0] if is_prefix and len(missing) else len(keys)
                if not unknown[:stop].any() or time.monotonic() >= end:
                    return ready
                pool.storage.poll()
            time.sleep(POLL_SECONDS)

    def _move(self, verb: str, transfers: Sequence[Any]) -> dict[str, list[bool]]:
        begun = {
            each.name: self._begin(verb, str(each.name), each.keys or [], each.host_indices)
            for each in transfers
        }
        return {each.name: self._wait(begun[each.name], len(each.keys or ())) for each in transfers}

    def _begin(
        self, verb: str, name: str, keys: Sequence[str], host_indices: Any
    ) -> tuple[Storage, StorageJob] | None:
        """Begin to store or load pages of a pool; None if it cannot."""
        pool = self._pools.get(name)
        if pool is None or not keys or host_indices is None:
            return None
        if len(host_indices) != len(keys) * pool.host.page_size:
            return None
        pointers, _ = pool.host.get_page_buffer_meta(host_indices)
        addresses = np.array(pointers, dtype=np.int64).reshape(len(keys), -1)
        with self._lock:
            return pool.storage, getattr(pool.storage, verb)(_keys(keys), addresses)

    def _wait(self, begun: tuple[Storage, StorageJob] | None, num_pages: int) -> list[bool]:
        """Wait for a job; return, for each page, whether it was stored or loaded whole."""
        if begun is None:
            return [False] * num_pages
        storage, job = begun
        while storage.is_busy and not job.is_done:  # every tier ends a batch by its own deadline
            time.sleep(POLL_SECONDS)
            with self._lock:
                storage.poll()
        return [bool(ok) for ok in job.ok]


def weights_of(args: Any) -> str:
    """Return an identifier of the server's weights; empty if there is no reliable one.

    For a model from a hub it is the commit. For a local folder it is a digest of the configuration
    and of the weight files' names, sizes and times.
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
        except ValueError:  # the path is not the name of a model on a hub
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
    """Return the arguments of the server that this process belongs to; None outside of one."""
    try:
        from sglang.srt.runtime_context import get_server_args  # 0.5.23
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AssertionError):
        return None


def _keys(keys: Sequence[str]) -> Keys:
    return hashed_keys((key.encode() for key in keys), _PERSON)


def _namespace(
    parallel: HiCacheStorageConfig, pool: Any, args: Any, revision: str, sizes: Sequence[int]
) -> Namespace:
    """Return all that decides a page's bytes; SGLang's own configuration has only part of it."""
    dtypes = [getattr(pool, each, None) for each in ("dtype", "temporal_dtype", "conv_dtype")]
    return Namespace(
        model=parallel.model_name or str(getattr(args, "model_path", "")) or "unknown",
        revision=revision,
        dtype=" ".join(str(dtype) for dtype in dtypes if dtype is not None),
        layout=f"sglang {pool.layout} {type(pool).__name__}",
        geometry={
            "layers": [
                getattr(pool, each, None) for each in ("start_layer", "end_layer", "layer_num")
            ],
            "pieces": [int(size) for size in sizes],
            "tp": [parallel.tp_size, parallel.should_split_heads],
            "pp": parallel.pp_size,
            "cp": [parallel.attn_cp_size, getattr(parallel, "dcp_size", 1)],
            "format": str(getattr(pool, "storage_format_tag", None)),
        },
        block_tokens=int(pool.page_size),
        overrides={each: str(getattr(args, each, None)) for each in _SERVER_ARGS},
    )


def _setup(
    parallel: HiCacheStorageConfig,
    namespace: Namespace,
    first: Namespace,
    name: str,
    pool: Any,
    block_bytes: int,
    pools: Sequence[str],
    num_nodes: int,
) -> TierSetup:
    """Return the identity of a pool's blocks; ``first`` is the first pool's namespace."""
    # With MLA all ranks hold the same pages, but each has its own heads and recurrent states.
    kinds = {kind.__name__ for kind in type(pool).__mro__}
    is_alike = parallel.is_mla_model and not kinds & {"MHATokenToKVPoolHost", "MambaPoolHost"}
    tp_rank = 0 if is_alike else parallel.tp_rank
    ranks = (tp_rank, parallel.pp_rank, parallel.attn_cp_rank, getattr(parallel, "dcp_rank", 0))
    engine = getattr(parallel, "dp_rank", 0)
    num_ranks = parallel.tp_size * parallel.pp_size * parallel.attn_cp_size
    families = {each: store_fingerprint(first, engine, each) for each in pools}
    return TierSetup(
        TierName(""),
        block_bytes,
        num_ranks_here=max(1, num_ranks // num_nodes) * len(pools),
        namespace=store_fingerprint(namespace, (*ranks, engine), name),
        family=families[name],
        families=tuple(families.values()),
        label=namespace.model,
        shared_namespace=store_fingerprint(namespace, ranks, name),
    )
