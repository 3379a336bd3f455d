"""SGLang's radix cache with HiCache below it, on the CPU: tokens in, bytes on the device out.

All is SGLang's own but the copies between device and host, which are CUDA kernels there.
"""

from __future__ import annotations

import atexit
import json
import time
import zlib
from array import array
from typing import Any

from tests.sglang import cpu  # before sglang

cpu.ABSENT = (*cpu.ABSENT, "sglang.srt.entrypoints.openai.protocol", "partial_json_parser")

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tests.sglang.cpu import LONG, PAGE, start_distributed

LAYERS, TOKENS = 2, 1024


def _to_host(host: Any, device: Any, there: Any, here: Any, io_backend: str) -> None:
    for layer in range(LAYERS):
        host.k_buffer[layer][there] = device.k_buffer[layer][here]
        host.v_buffer[layer][there] = device.v_buffer[layer][here]


def _to_device(
    host: Any, device: Any, there: Any, here: Any, layer: int, io_backend: str, **_: Any
) -> None:
    device.k_buffer[layer][here] = host.k_buffer[layer][there]
    device.v_buffer[layer][here] = host.v_buffer[layer][there]


common._cuda_host_register = lambda *_, **__: None
torch.cpu.Stream.synchronize = lambda self: None
MHATokenToKVPoolHost.backup_from_device_all_layer = _to_host
MHATokenToKVPoolHost.load_to_device_per_layer = _to_device


def computed_for(tokens: list[int]) -> torch.Tensor:
    """What a model computes: each page from all tokens up to its end."""
    pages = []
    for end in range(PAGE, len(tokens) + 1, PAGE):
        random = torch.Generator().manual_seed(zlib.crc32(repr(tokens[:end]).encode()))
        pages.append(torch.randint(0, 255, (2 * LAYERS, PAGE, 2, 8), generator=random))
    return torch.cat(pages, dim=1).to(torch.bfloat16)


class RadixServer:
    """What SGLang's scheduler does with a prompt: look it up, fetch it, compute and keep the rest.

    ``serve`` returns what the device has for all tokens of the prompt.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        start_distributed()
        self.device = MHATokenToKVPool(
            size=TOKENS,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.layers = [*self.device.k_buffer, *self.device.v_buffer]
        self.slots = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", self.device, False
        )
        extra = {
            "backend_name": "kvferry",
            "module_path": "kvferry.connectors.sglang.storage",
            "class_name": "KvferryStorage",
            "interface_v1": 1,
            "prefetch_threshold": 1,
            **settings,
        }
        args = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete",
        )
        set_global_server_args_for_scheduler(args)
        requests = ReqToTokenPool(
            size=8, max_context_len=512, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
            tp_cache_group=dist.group.WORLD,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params=params)
        self.cache.init_hicache(args, params)
        atexit.unregister(self.cache.shutdown)
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        self.storage = controller.storage_backend
        self.num_requests = 0
        self.num_fetched = 0

    def _match(self, tokens: list[int]) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def _wait(self, what: Any) -> None:
        end = time.monotonic() + LONG
        while not what():
            assert time.monotonic() < end
            self.cache.check_hicache_events()
            time.sleep(0.001)

    def serve(self, tokens: list[int]) -> torch.Tensor:
        """Serve a prompt of whole pages; the bytes of all its tokens on the device."""
        self.num_requests += 1
        handle = CacheRequestHandle(f"request-{self.num_requests}", 0)
        found = self._match(tokens)
        there = found.device_prefix_len + found.host_hit_length
        if there < len(tokens):
            hashes = get_hash_str(tokens[:there], None, page_size=PAGE) if there else [None]
            self.cache.prefetch_from_storage(
                handle, found.last_host_node, array("q", tokens[there:]), hashes[-1]
            )
            self._wait(lambda: self.cache.check_prefetch_progress(handle))
            found = self._match(tokens)
            self.num_fetched += found.device_prefix_len + found.host_hit_length - there
        if found.host_hit_length and self.cache.load_back(found.best_match_node):
            self.cache.ready_to_load_host_cache()
            self._wait(lambda: self._match(tokens).host_hit_length == 0)
            found = self._match(tokens)
        start = found.device_prefix_len
        path = self.cache.path_device_indices(found.last_device_node)
        if start < len(tokens):
            new = self.slots.alloc(len(tokens) - start)
            assert new is not None, "a prompt has no room on the device"
            for layer, computed in zip(self.layers, computed_for(tokens), strict=True):
                layer[new] = computed[start:]
            path = torch.cat([path, new])
            key = RadixKey(array("q", tokens))
            self.cache.insert(InsertParams(key=key, value=path, prev_prefix_len=start))
        hashes = get_hash_str(tokens, None, page_size=PAGE)
        self._wait(lambda: self.storage.batch_exists(hashes) == len(hashes))
        return torch.stack([layer[path].clone() for layer in self.layers])

    def close(self) -> None:
        self.cache.cache_controller.detach_storage_backend()
