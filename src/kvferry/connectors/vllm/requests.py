"""Requests whose blocks are on their way to a rank: what vLLM waits to hear of, and hears."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvferry.connectors.vllm.messages import EarlyShares, StepOrders
from kvferry.core.identity import Namespace, adopt, adopt_one
from kvferry.core.keys import Keys
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import Ordered
from kvferry.types import Key, TransferId


@dataclass(eq=False)
class AwaitedLoad:
    """Ends when nothing is waited for. ``blocks`` are the device blocks it brings.

    With ``early`` shares vLLM may be told before it lands: when so much of it has landed. One that
    ``is_open`` waits for more pieces; of one in pieces only the ``lost`` blocks did not come.
    """

    request_id: str
    waiting: set[TransferId]
    epoch: int
    blocks: set[int] = field(default_factory=set)
    failed: bool = False
    early: EarlyShares | None = None
    is_told: bool = False
    is_open: bool = False
    in_pieces: bool = False
    lost: set[int] = field(default_factory=set)
    transfers: frozenset[TransferId] = field(init=False)
    _brought: dict[TransferId, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transfers = frozenset(self.waiting)

    def bring(self, transfer_id: TransferId, blocks: list[int]) -> None:
        """One of its transfers is to fill these blocks."""
        self.blocks.update(blocks)
        if self.in_pieces:
            self._brought[transfer_id] = blocks

    def end(self, transfer_id: TransferId, *, ok: bool) -> bool:
        """One of its transfers has ended; returns whether the load has."""
        self.waiting.discard(transfer_id)
        brought = self._brought.pop(transfer_id, ())
        if not ok:
            self.lose(brought if self.in_pieces else self.blocks)
        return not self.waiting and not self.is_open

    def lose(self, blocks: Iterable[int]) -> None:
        """These blocks of it did not come."""
        self.failed = True
        self.lost.update(blocks)
        self.blocks.update(blocks)


class LoadsInPieces:
    """Owns the loads of which more pieces follow, by request, until they are closed.

    vLLM is told of one when it is closed and nothing of it is on its way, and not before: a rank
    that told twice would let a request run whose blocks another rank still writes.
    """

    def __init__(self) -> None:
        self._open: dict[str, AwaitedLoad] = {}

    def ordered(
        self, request_id: str, ids: Iterable[TransferId], orders: StepOrders
    ) -> AwaitedLoad:
        """These transfers are a load, or one more piece of one."""
        load = self._open.pop(request_id, None)
        if load is None:
            load = AwaitedLoad(request_id, set(ids), orders.epoch)
        else:
            load.waiting.update(ids)
        load.is_open = request_id in orders.going_on
        if load.is_open:
            load.in_pieces = True
            self._open[request_id] = load
        return load

    def close(self, request_id: str, blocks: Iterable[int]) -> AwaitedLoad | None:
        """No more of it follows, and these blocks will not come; None if it is not open."""
        load = self._open.pop(request_id, None)
        if load is not None:
            load.is_open = False
            load.lose(blocks)
        return load

    def give_up(self, orders: StepOrders) -> Iterator[tuple[str, set[int]]]:
        """Nothing of these, or of a step's orders, can be trusted: what to tell vLLM of now.

        Those of which more pieces follow it hears of once they are closed.
        """
        blocks = {t.id: t.dst_slots.tolist() for t in orders.plan.transfers}
        for request_id, ids in orders.loads.items():
            load = self.ordered(request_id, ids, orders)
            load.lose({block for id in ids for block in blocks.get(id, ())})
            if not load.is_open:
                yield request_id, load.blocks
        for load in self._open.values():
            load.waiting.clear()
            load.lose(load.blocks.copy())
        for request_id, undone in orders.undone.items():
            closed = self.close(request_id, undone)
            yield request_id, set(undone) if closed is None else closed.lost


class ToldLoads:
    """What vLLM is told of loads at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests that need not wait any longer, whether their blocks came or not."""
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def fail(self, request_id: str, blocks: Iterable[int]) -> None:
        self.arrived.add(request_id)
        self._failed.add(request_id)
        self._invalid.update(blocks)

    def take_arrived(self) -> set[str]:
        arrived, self.arrived = self.arrived, self.arrived and set()
        return arrived

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, self._failed and set()
        return failed

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, self._invalid and set()
        return invalid


# ------------------------------------------------------------------------------------------------
# What vLLM was promised and waits for.
#
# A load whose blocks still come up goes to the ranks in pieces::
#
#     allocated ─> first piece ─> ... ─> last piece        a load like any other, to vLLM
#                           └──────────> closed: what was not ordered by then is computed
#
# vLLM hears of a request once from every rank. So a rank that has copied a piece must know whether
# more follow; and whatever ends a load early, a request's own end too, must be told to the ranks.


class Promise(NamedTuple):
    """A load that vLLM waits for: whose it is, its transfers, the first group's blocks.

    Or a further piece of one. Without transfers nothing will bring it, and vLLM must be told. With
    ``early`` shares vLLM may be told of it before it has landed.
    """

    ferried: Request
    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]
    early: EarlyShares | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its loads are ordered, and were not taken back since."""
        return self.ferried.loading.issuperset(self.transfers)


class SortedOut(NamedTuple):
    """What the ranks are told of promises, by request: see ``StepOrders``."""

    loads: dict[str, tuple[TransferId, ...]]
    undone: dict[str, tuple[int, ...]]
    early: dict[str, EarlyShares]
    going_on: frozenset[str]


class Promises:
    """Owns what vLLM was promised and no rank was told of: loads, pieces, and the rest of loads."""

    def __init__(self) -> None:
        self._made: list[Promise] = []
        self._rest: dict[Request, dict[int, None]] = {}
        """Loads that the ranks believe to be open, and the blocks not ordered yet of each."""

    def __bool__(self) -> bool:
        return bool(self._made or self._rest)

    def make(
        self,
        ferried: Request,
        told: tuple[int, ...],
        ordered: Sequence[Ordered],
        early: EarlyShares | None,
    ) -> None:
        """vLLM counts on these blocks; this much of a load of them was ordered, or nothing."""
        transfers = tuple([part.transfer for part in ordered])
        self._made.append(Promise(ferried, transfers, told, early))
        if ferried.has_more_to_load:
            self._rest[ferried] = dict.fromkeys(told)
            self._note_ordered(ordered)

    def go_on(self, ordered: Sequence[Ordered]) -> None:
        """More pieces were ordered."""
        self._note_ordered(ordered)
        for part in ordered:
            blocks = tuple(part.blocks.tolist())
            self._made.append(Promise(part.request, (part.transfer,), blocks))

    def _note_ordered(self, ordered: Iterable[Ordered]) -> None:
        for part in ordered:
            for block in part.blocks.tolist():
                self._rest[part.request].pop(block, None)

    def take(self) -> SortedOut:
        """A step's orders go to the ranks.

        A load in pieces is closed with its last one; by the blocks that it lacks, where there is
        none.
        """
        loads: dict[str, tuple[TransferId, ...]] = {}
        undone: dict[str, tuple[int, ...]] = {}
        early: dict[str, EarlyShares] = {}
        going_on: set[str] = set()
        for promise in self._made:
            name = promise.ferried.id
            if not promise.transfers:
                undone[name] = promise.blocks
            elif promise.is_kept:
                loads[name] = loads.get(name, ()) + promise.transfers
                if promise.early is not None:
                    early[name] = promise.early
        self._made.clear()
        for ferried, rest in tuple(self._rest.items()):
            if ferried.has_more_to_load:
                going_on.add(ferried.id)
                continue
            del self._rest[ferried]
            if rest or ferried.id not in loads:
                going_on.add(ferried.id)  # until it is closed, in the same step
                undone[ferried.id] = tuple(rest)
        return SortedOut(loads, undone, early, frozenset(going_on))

    @property
    def unkept(self) -> dict[str, tuple[int, ...]]:
        """Loads vLLM waits for, and the blocks of each that no rank was told to fill."""
        unkept = {ferried.id: tuple(rest) for ferried, rest in self._rest.items()}
        for promise in self._made:
            name = promise.ferried.id
            unkept[name] = unkept.get(name, ()) + promise.blocks
        return unkept


# ------------------------------------------------------------------------------------------------
# A request as both schedulers know it.


class Tracked:
    """One vLLM request and ours of the same name. Owns neither; ours knows how it stands."""

    __slots__ = (
        "_began",
        "claimed_tokens",
        "computed_tokens",
        "ferried",
        "is_timed",
        "preemptions",
        "request",
    )

    def __init__(self, request: Any, ferried: Request) -> None:
        self.request = request
        self.ferried = ferried
        self.preemptions = request.num_preemptions
        self.computed_tokens = 0  # vLLM had when it last asked
        self.claimed_tokens = 0  # that it was promised more
        self.is_timed = False
        self._began: tuple[float, int] | None = None

    def asks(self, computed_tokens: int, hash_tokens: int) -> None:
        """vLLM asks for what is behind so many tokens, which it has."""
        self.computed_tokens, self.claimed_tokens = computed_tokens, 0
        past = computed_tokens // hash_tokens
        self.ferried.chain.num_past = past  # type: ignore[attr-defined]  # ours are RequestKeys

    def note_preemption(self) -> None:
        """vLLM may preempt and resume a request before it tells us: its own count tells earlier."""
        self.preemptions = self.request.num_preemptions
        self.ferried.preempt()

    def time_prefill(self) -> tuple[int, float] | None:
        """Call in every step it runs: once, the prompt tokens it computed and how long that took.

        From its first step to the one after its first token, with whatever else ran meanwhile:
        that is what computing costs here.
        """
        request = self.request
        if self.is_timed:
            return None
        if self._began is None:
            self._began = (time.monotonic(), request.num_computed_tokens)
            self.is_timed = request.num_output_tokens > 0  # resumed: its prompt was timed before
            return None
        if not request.num_output_tokens:
            return None
        self.is_timed = True
        start, had_tokens = self._began
        return request.num_prompt_tokens - had_tokens, time.monotonic() - start


# ------------------------------------------------------------------------------------------------
# The keys of one vLLM request: adopted from its block hashes, extended as it grows.

_NO_KEYS = Keys.empty()
_MOST_KEYS = 1 << 17
"""Of requests that have ended: 4 MiB."""


class Naming:
    """Whose hashes become which keys. Owns the keys of requests that ended lately.

    Who goes on with one of those has the same hash where that ended, and so the same keys up to
    there: to name a conversation's new blocks takes a fraction of what all of them take.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._ended: dict[bytes, Keys] = {}  # by the last hash, the oldest first
        self._num_keys = 0

    def remember(self, last: bytes, keys: Keys) -> None:
        """A request has ended whose last block has this hash."""
        self.take(last)
        self._ended[last] = keys
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS:
            self.take(next(iter(self._ended)))

    def take(self, last: bytes) -> Keys | None:
        """The keys of a request that ended with this hash, if remembered: who goes on has them."""
        keys = self._ended.pop(last, None)
        if keys is not None:
            self._num_keys -= len(keys)
        return keys


class RequestKeys:
    """A vLLM request and the keys of the hash blocks it has so far: its chain.

    Owns nothing of vLLM's; reads ``block_hashes``, which vLLM extends with every full block of
    known tokens. Those hashes cover the salt, the adapter and the images of the request.
    """

    __slots__ = ("_keys", "_last", "_naming", "_num_ended", "had_blocks", "num_past", "request")

    def __init__(self, request: Any, naming: Naming) -> None:
        self.request = request
        self._naming = naming
        self._keys = _NO_KEYS
        self._last: bytes | None = None
        self._num_ended = 0  # blocks, once it has; until that is remembered
        self.num_past = 0
        """Blocks that vLLM had of it when it came: where it may go on with one that has ended."""
        self.had_blocks: Sequence[Sequence[int]] = ()
        """Once it has ended: its device blocks, by group. They may be others' by now."""

    def __len__(self) -> int:
        return len(self.request.block_hashes)

    def __getitem__(self, position: int) -> Key:
        """One key, without the others."""
        return adopt_one(self._naming.namespace, self.request.block_hashes[position])

    def keys(self) -> Keys:
        hashes = self.request.block_hashes
        known = len(self._keys.array)
        # Chained, so one equal hash means that all before it are equal: a request whose tokens
        # were replaced (streamed input) starts over.
        if known > len(hashes) or (known and hashes[known - 1] != self._last):
            self._keys, known = _NO_KEYS, 0
        if not known and 0 < self.num_past <= len(hashes):
            known = self._go_on(hashes[self.num_past - 1])
        if known < len(hashes):
            new = adopt(self._naming.namespace, hashes[known:])
            self._keys = self._keys + new if known else new
            self._last = hashes[-1]
        if 0 < self._num_ended <= len(hashes):
            count, self._num_ended = self._num_ended, 0
            # Copied, or a few keys of a long prompt would keep all of its alive.
            ended = self._keys if count == len(hashes) else self._keys.take(np.arange(count))
            self._naming.remember(hashes[count - 1], ended)
        return self._keys

    def _go_on(self, last: bytes) -> int:
        """Take up the keys of a request that ended where this one goes on; returns how many."""
        keys = self._naming.take(last)
        if keys is None or len(keys) != self.num_past:
            return 0
        self._keys, self._last = keys, last
        return len(keys)

    def end(self, block_ids: Sequence[Sequence[int]]) -> None:
        """It is over, and had these blocks: its next turn goes on where it is computed up to."""
        self.had_blocks = block_ids
        computed = getattr(self.request, "num_computed_tokens", 0)
        self._num_ended = computed // self._naming.namespace.block_tokens
