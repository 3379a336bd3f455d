"""SGLang's HiCache on a machine without a GPU: its own controller, host pool and threads.

Import this module before sglang. It puts empty stand-ins in the place of libraries that need CUDA
or are not used here, so that SGLang's modules can be imported. All that runs is SGLang's own.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import secrets
import socket
import sys
import threading
import time
import types
from typing import Any

__all__ = [
    "LONG",
    "PAGE",
    "HybridServer",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "Server",
    "get_hash_str",
    "start_distributed",
]
ABSENT: tuple[str, ...] = ("sgl_kernel", "torchvision", "soundfile", "IPython")
LONG = 60.0
PAGE = 16


class _Name(type):
    """A class whose every attribute is another one: enough for a module that only names things."""

    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Absent(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name in ABSENT or name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.meta_path.insert(0, _Finder())

import torch
import torch.distributed as dist
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel


def start_distributed(rank: int = 0, num_ranks: int = 1, port: int | None = None) -> None:
    """The process groups and ranks that SGLang's scheduler has when HiCache starts."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    get_parallel().override_permanently(
        tp_rank=rank, tp_size=num_ranks, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    )


def host_pool(pool: Any, layout: str, layers: int) -> Any:
    (described,) = pool.get_device_pool_infos()
    is_mla = isinstance(pool, MLATokenToKVPool)
    kind = MLATokenToKVPoolHost if is_mla else MHATokenToKVPoolHost
    return kind(
        described.buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=layers,
        **({"target_layer_num": layers} if is_mla else {}),
    )


class Server:
    """One rank's HiCache with kvferry behind it. Pages are whatever bytes a test puts there."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        layout: str = "page_first",
        dtype: torch.dtype = torch.bfloat16,
        layers: int = 3,
        model: str = "a/model",
        tokens: int = 1024,
        mla: bool = False,
    ) -> None:
        start_distributed(
            *(() if not dist.is_initialized() else (dist.get_rank(), dist.get_world_size()))
        )
        kind = MLATokenToKVPool if mla else MHATokenToKVPool
        heads = (
            {"kv_lora_rank": 8, "qk_rope_head_dim": 8} if mla else {"head_num": 2, "head_dim": 8}
        )
        pool = kind(
            size=tokens,
            page_size=PAGE,
            dtype=dtype,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
            **heads,
        )
        self.host = host_pool(pool, layout, layers)
        self.bytes = self.host.kv_buffer.view(torch.uint8)
        self.controller = self.make_controller(pool, layout)(
            PagedTokenToKVPoolAllocator(tokens, PAGE, dtype, "cpu", pool, False),
            self.pools,
            PAGE,
            dist.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name=model,
            storage_backend_extra_config={
                "backend_name": "kvferry",
                "module_path": "kvferry.connectors.sglang.storage",
                "class_name": "KvferryStorage",
                "interface_v1": 1,
                **settings,
            },
        )
        self.storage = self.controller.storage_backend

    def make_controller(self, pool: MHATokenToKVPool, layout: str) -> type[HiCacheController]:
        self.pools: Any = self.host
        return HiCacheController

    def page(self, index: int) -> bytes:
        """The bytes of the page at a host index."""
        return self.host.get_data_page(index).view(torch.uint8).numpy().tobytes()

    def filled(self, tokens: list[int]) -> torch.Tensor:
        """Host pages of random bytes for these tokens."""
        indices = self.host.alloc(len(tokens) // PAGE * PAGE)
        for index in indices[::PAGE]:
            page = self.host.get_dummy_flat_data_page()
            # Not torch's own numbers, which are the same ones on every rank.
            random = bytearray(secrets.token_bytes(page.nbytes))
            page.view(torch.uint8).copy_(torch.frombuffer(random, dtype=torch.uint8))
            self.host.set_from_flat_data_page(index, page)
        return indices

    def backup(self, tokens: list[int]) -> list[bytes]:
        """Fill host pages for these tokens with random bytes and back them up; returns them."""
        return self.write(tokens, self.filled(tokens))

    def write(self, tokens: list[int], indices: torch.Tensor, **more: Any) -> list[bytes]:
        hashes = get_hash_str(tokens[: len(indices)], None, page_size=PAGE)
        pages = [self.page(index) for index in indices[::PAGE]]
        self.controller.write_storage(indices, tokens[: len(indices)], hash_value=hashes, **more)
        self.controller.ack_backup_queue.get(timeout=LONG)
        self.host.free(indices)
        return pages

    def prefetch(self, tokens: list[int]) -> list[bytes]:
        """The leading pages that come back for these tokens, into memory full of other bytes."""
        self.controller.prefetch(secrets.token_hex(4), tokens)
        return self.fetched(self.controller.prefetch_hit_queue.get(timeout=LONG))[0]

    def fetched(self, operation: Any) -> tuple[list[bytes], dict[str, int]]:
        """The pages that an operation brings up, and what it brings up of other pools."""
        if not operation.storage_hit_count:
            return [], {}
        operation.host_indices = indices = self.host.alloc(operation.storage_hit_count)
        self.bytes.fill_(0xEE)
        self.controller.prefetch_buffer.put(operation)
        completed, end = 0, time.monotonic() + LONG
        hits: dict[str, int] = {}
        while time.monotonic() < end:
            ack = self.controller.ack_prefetch_queue.get(timeout=LONG)
            if ack.completed_req:
                break
            completed = max(completed, ack.completed_tokens or 0)
            hits |= ack.pool_hits or {}
        pages = [self.page(index) for index in indices[:completed:PAGE]]
        self.host.free(indices)
        return pages, hits

    def close(self) -> None:
        self.controller.detach_storage_backend()


class HybridServer(Server):
    """The same with two more pools: a window's pages, and recurrent states, as hybrid models have.

    A prompt that is backed up has a window of ``WINDOW`` pages and one state at its end.
    """

    WINDOW = 3

    def make_controller(self, pool: MHATokenToKVPool, layout: str) -> type[HiCacheController]:
        layers = 2
        self.window = host_pool(
            MHATokenToKVPool(
                size=pool.size,
                page_size=PAGE,
                dtype=torch.bfloat16,
                head_num=1,
                head_dim=8,
                layer_num=layers,
                device="cpu",
                enable_memory_saver=False,
            ),
            layout,
            layers,
        )
        states = MambaStateBufferInfo(
            temporal=torch.zeros(2, 8, 4, 6), conv=(torch.zeros(2, 8, 3, 5),)
        )
        self.states = MambaPoolHost(
            states, 8.0, 0, device_capacity=8, pin_memory=False, layout=layout
        )
        names = (PoolName.KV, PoolName.SWA, PoolName.MAMBA)
        self.pools = HostPoolGroup(
            [
                PoolEntry(name, host, None, lambda layer: layer, name is PoolName.KV)
                for name, host in zip(names, (self.host, self.window, self.states), strict=True)
            ]
        )
        return HybridCacheController

    def transfers(self, hashes: list[str], kinds: str = "ws") -> list[PoolTransfer]:
        """What comes with a prompt that ends at the last hash."""
        trailing = PoolHitPolicy.TRAILING_PAGES
        made = []
        if "w" in kinds:
            keys = hashes[-self.WINDOW :]
            indices = self.window.alloc(len(keys) * PAGE)
            made.append(PoolTransfer(PoolName.SWA, indices, None, keys, trailing))
        if "s" in kinds:
            made.append(
                PoolTransfer(PoolName.MAMBA, self.states.alloc(1), None, hashes[-1:], trailing)
            )
        return made

    def parts(self, transfers: list[PoolTransfer]) -> list[torch.Tensor]:
        """The memory of what these transfers name, as bytes."""
        found = []
        for each in transfers:
            host = self.window if each.name == PoolName.SWA else self.states
            pointers, sizes = host.get_page_buffer_meta(each.host_indices)
            for at, size in zip(pointers, sizes, strict=True):
                raw = (ctypes.c_uint8 * size).from_address(at)
                found.append(torch.frombuffer(raw, dtype=torch.uint8))
        return found

    def backup_all(self, tokens: list[int]) -> tuple[list[bytes], list[bytes]]:
        """Back a prompt up with its window and state, all of random bytes; returns them."""
        extra = self.transfers(get_hash_str(tokens, None, page_size=PAGE))
        for part in self.parts(extra):
            part.random_(0, 255)
        parts = [part.numpy().tobytes() for part in self.parts(extra)]
        pages = self.write(tokens, self.filled(tokens), extra_pools=extra)
        self.free(extra)
        return pages, parts

    def prefetch_all(self, tokens: list[int]) -> tuple[list[bytes], list[bytes]]:
        """The pages, and the window and state at their end, that come back for these tokens."""
        hashes = get_hash_str(tokens, None, page_size=PAGE)
        extra = self.transfers(hashes)
        handle = types.SimpleNamespace(rid=secrets.token_hex(4))
        self.controller.prefetch(handle, tokens, extra_pools=extra)
        operation = self.controller.prefetch_hit_queue.get(timeout=LONG)
        if not operation.storage_hit_count:
            self.free(extra)
            return [], []
        pages, hits = self.fetched(operation)
        whole = all(hits.get(each.name) == len(each.keys) for each in operation.pool_transfers)
        parts = [part.numpy().tobytes() for part in self.parts(operation.pool_transfers)]
        self.free(operation.pool_transfers)
        return pages, parts if whole else []

    def free(self, transfers: list[PoolTransfer]) -> None:
        for each in transfers:
            (self.window if each.name == PoolName.SWA else self.states).free(each.host_indices)
