"""The connector's side in vLLM's scheduler, without vLLM: the test is vLLM and every rank.

The block pool keeps vLLM's rules as far as they are used here: references, a queue of free blocks,
and a cache of named ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.fakes.vllm_hooks import VllmHooks
from tests.fakes.vllm_parts import BLOCK_TOKENS as BLOCK_TOKENS
from tests.fakes.vllm_parts import request_of, step_of
from tests.fakes.vllm_pool import BlockPool

from kvferry.cache.reach import FullAttention, Group, RecurrentState
from kvferry.config import Config
from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.messages import RankShape, StepOrders, StepReceipts
from kvferry.core.identity import Namespace
from kvferry.types import Outcome, Rank, Receipt


class FakeVllm:
    """vLLM's scheduler with this side of ours, and its ranks, which copy nothing."""

    def __init__(
        self, *groups: Group, num_blocks: int = 64, num_ranks: int = 1, **settings: Any
    ) -> None:
        self.groups = groups or (FullAttention(BLOCK_TOKENS),)
        self.num_ranks = num_ranks
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.tables: dict[str, tuple[list[int], ...]] = {}
        namespace = Namespace(
            model="m", dtype="f", layout="l", geometry="g", block_tokens=1, revision="r"
        )
        setup = SessionSetup(
            config=Config.from_dict({"load_policy": "always", "metrics_port": None, **settings}),
            groups=self.groups,
            num_ranks=num_ranks,
            reported_tokens=self.groups[0].block_tokens,
            fails_by_block=len(self.groups) == 1 and not isinstance(self.groups[0], RecurrentState),
        )
        self.side = VllmHooks(setup, namespace)
        self.side.bind_manager(
            SimpleNamespace(block_pool=self.pool, get_block_ids=lambda name: self.tables[name])
        )
        shape = RankShape(
            Rank(0),
            num_slots=64,
            ready_slots=64,
            slot_bytes=64,
            block_bytes=(64,) * len(groups or "1"),
        )
        self.side.meet_ranks(
            [RankShape(Rank(n), 64, 64, 64, shape.block_bytes) for n in range(num_ranks)]
        )
        assert self.serving is not None, self.side.idle_reason

    @property
    def serving(self) -> Any:
        return self.side.serving

    def request(self, name: str, hashes: Sequence[bytes], computed: int = 0) -> Any:
        return request_of(name, hashes, computed)

    def allocate(self, request: Any, num_external_tokens: int = 0) -> None:
        """Give a request blocks for all of its tokens, and say so."""
        tables = []
        for group in self.groups:
            taken = self.pool.get_new_blocks(-(-request.num_tokens // group.block_tokens))
            tables.append([block.block_id for block in taken])
        self.tables[request.request_id] = tuple(tables)
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(tables))
        self.side.allocated(request, blocks, num_external_tokens)

    def free(self, request: Any) -> None:
        """The request has ended: tell, then take its blocks back."""
        self.side.finished(request, self.tables.get(request.request_id, ()))
        self.take_back(request)

    def take_back(self, request: Any) -> None:
        """Its blocks are no longer its own."""
        for ids in self.tables.pop(request.request_id, ()):
            self.pool.free_blocks([self.pool.blocks[number] for number in ids])

    def cache(self, request: Any) -> None:
        """Name the blocks that a request has computed, as vLLM does in every step."""
        for group, (kind, ids) in enumerate(
            zip(self.groups, self.tables[request.request_id], strict=True)
        ):
            computed = request.num_computed_tokens // kind.block_tokens
            known = len(request.block_hashes) * BLOCK_TOKENS // kind.block_tokens
            blocks = [self.pool.blocks[number] for number in ids]
            named = sum(block.block_hash is not None for block in blocks)
            end = max(named, min(computed, known))
            self.pool.cache_full_blocks(request, blocks, named, end, kind.block_tokens, group)

    def orders(
        self, scheduled: dict[str, int] | None = None, *, new: Sequence[str] = ()
    ) -> StepOrders:
        orders = self.side.orders(step_of(self.tables, scheduled or {}, new))
        copied: StepOrders = pickle.loads(pickle.dumps(orders))  # ranks are other processes
        return copied

    def answer(self, *orders: StepOrders, ranks: Sequence[int] | None = None) -> None:
        """These ranks (all, if none is named) have done all that is in these orders."""
        receipts, drained = [], []
        for rank in range(self.num_ranks) if ranks is None else ranks:
            for each in orders:
                receipts += [Receipt(t.id, Rank(rank), Outcome.OK) for t in each.plan.transfers]
                drained += [Rank(rank)] if each.drain else []
        report = StepReceipts(tuple(receipts), drained=tuple(drained))
        report = pickle.loads(pickle.dumps(report))
        self.side.take(SimpleNamespace(kv_connector_worker_meta=report))

    @property
    def num_held(self) -> int:
        """References of ours: those beyond what requests have."""
        theirs = sum(len(ids) for table in self.tables.values() for ids in table)
        return sum(block.ref_cnt for block in self.pool.blocks[1:]) - theirs
