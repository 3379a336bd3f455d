"""Our scheduler inside vLLM's: made once vLLM has bound its pool and every rank has been heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from kvferry import reach
from kvferry.config import Config
from kvferry.pool import Pool
from kvferry.quantities import rounded_size
from kvferry.scheduler import Scheduler
from kvferry.types import Rank
from kvferry.vllm import translate
from kvferry.vllm.guard import Guard, guarded
from kvferry.vllm.holds import BlockHolds
from kvferry.vllm.leftovers import Leftovers
from kvferry.vllm.messages import RankShape
from kvferry.vllm.sight import Sight
from kvferry.vllm.tables import DeviceTables

log = init_logger("vllm.kvferry")

_STORE_TOKENS = 4096
"""A running request is stored when it has this many more tokens, and when it ends: every store
costs the scheduler the same, however few blocks it has. Nothing is lost meanwhile but what a
preemption takes, because blocks in use stay on the device."""

_HURRY = 8
"""Where vLLM evicts, it may preempt as well: so many times as often."""


class Service:
    """Owns our scheduler, the holds on vLLM's blocks and what the ranks said of themselves.

    Leaves requests to those who build on it. Until all is known, or if kvferry is to be idle, there
    is no scheduler.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, support: translate.Support
    ) -> None:
        self.guard = Guard("scheduler")
        self.config = config
        self.support = support
        self.refusal = support.refusal
        self.scheduler: Scheduler | None = None
        self.holds: BlockHolds | None = None
        self.sight: Sight | None = None
        self.leftovers: Leftovers | None = None
        self._vllm_config = vllm_config
        self._num_ranks = int(vllm_config.parallel_config.world_size)
        self._kv_cache_config = kv_cache_config
        self._block_pool: Any = None
        self._manager: Any = None
        self._shapes: dict[int, RankShape] = {}
        self._ready: dict[Rank, int] = {}
        self._pinned: dict[Rank, int] = {}

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self.holds = BlockHolds(block_pool)

    def bind_manager(self, manager: Any) -> None:
        self._manager = manager
        self.bind_block_pool(manager.block_pool)

    @guarded(lambda: None)
    def meet_ranks(self, shapes: Sequence[RankShape]) -> None:
        """What the ranks found when they saw their KV tensors."""
        new = [shape for shape in shapes if shape.rank not in self._shapes]
        self._shapes |= {shape.rank: shape for shape in new}
        self._ready |= {shape.rank: shape.ready_slots for shape in new}
        refusals = [f"rank {shape.rank}: {shape.refusal}" for shape in new if shape.refusal]
        self.refusal = self.refusal or "; ".join(refusals)
        if new and len(self._shapes) == self._num_ranks:
            self._open()
            log.info(self.banner())

    @guarded(lambda: None)
    def _open(self) -> Scheduler | None:
        """Our scheduler, made when vLLM has bound its pool and every rank has been heard."""
        met_all = len(self._shapes) == self._num_ranks
        if self.scheduler is None and not self.refusal and met_all and self._block_pool is not None:
            hash_tokens = int(self._block_pool.hash_block_size)
            groups = self.support.groups
            self._namespace = translate.namespace_of(
                self._vllm_config, self._kv_cache_config, hash_tokens
            )
            self._hash_tokens = hash_tokens
            self._least_block = min(group.block_tokens for group in groups)
            # A window may pass a block before its turn comes; full attention keeps them all.
            is_full = all(isinstance(group, reach.FullAttention) for group in groups)
            num_blocks = max(1, _STORE_TOKENS // self._least_block) if is_full else 1
            self._store_step = self._least_block * num_blocks
            self._hasty_step = self._least_block * max(1, num_blocks // _HURRY)
            # The last block a draft model wrote may be of tokens that were then refused.
            drafts = translate.uses_draft_layers(self._vllm_config)
            step = reach.hit_alignment(groups, hash_block_tokens=hash_tokens)
            self._volatile = step if drafts else 0
            # A window that serves the token after the prompt may not reach back for its last one.
            self._claims_whole = is_full and not drafts
            self._stores_late = is_full
            self.scheduler = Scheduler(
                Pool(min(shape.num_slots for shape in self._shapes.values()), num_ready=0),
                groups,
                config=self.config,
                num_ranks=self._num_ranks,
                hash_block_tokens=hash_tokens,
                num_device_blocks=int(self._block_pool.num_gpu_blocks),
                block_bytes=self._shapes[0].block_bytes,
            )
            self.leftovers = Leftovers(
                self._require_holds(), num_device_blocks=int(self._block_pool.num_gpu_blocks)
            )
            self._tables = DeviceTables(groups, self._block_pool, self._manager, hash_tokens)
            self.sight = Sight(
                self.scheduler,
                self.config,
                shape=self._shapes[0],
                num_ranks=self._num_ranks,
                pinned=self._pinned,
                engine_here=int(self._vllm_config.parallel_config.data_parallel_rank_local or 0),
                has_listeners=translate.wants_events(self._vllm_config),
            )
            self._note_ready()
        return self.scheduler

    def _note_ready(self) -> None:
        """Host memory grows while requests already run."""
        if self.scheduler is not None:
            while self._ready:
                self.scheduler.note_ready(*self._ready.popitem())

    def banner(self) -> str:
        """One line for the log: what is in service, or why nothing is."""
        if self.refusal or self.guard.broken:
            return f"kvferry is idle: {self.refusal or self.guard.reason}"
        scheduler = self._open()
        if scheduler is None:
            return "kvferry is idle: vLLM has not bound its block pool"
        kinds = ", ".join(dict.fromkeys(type(group).__name__ for group in scheduler.groups))
        shared = "shared by" if self._shapes[0].is_shared else "on each of"
        host = rounded_size(scheduler.pool.num_slots * self._shapes[0].slot_bytes)
        return (
            f"kvferry is in service: {scheduler.pool.num_slots} blocks ({host}) of host memory "
            f"{shared} {self._num_ranks} rank(s), {len(scheduler.groups)} group(s) [{kinds}], "
            f"a block is {self._shapes[0].layout}, stores {self.config.store_mode}, "
            f"copy path {self.config.copy_path}, loads {self.config.load_policy}"
        )

    def _require_holds(self) -> BlockHolds:
        assert self.holds is not None  # bound together with the pool our scheduler needs
        return self.holds
