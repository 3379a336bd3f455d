"""Which device blocks are stored, and when: as they are computed, or as they are about to go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach
from kvferry.cache.policies.admission import SeenOften, Watermark
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.core.keys import Key, Keys
from kvferry.errors import InputError
from kvferry.scheduler.lookup import Matcher
from kvferry.scheduler.transfers import (
    NO_BLOCK,
    BlockTable,
    EngineBlocks,
    EngineShape,
    Ordered,
    Transfers,
    checked_blocks,
)
from kvferry.types import NO_SLOT, DeviceBlocks

Bound = tuple[int, Sequence[int]]
"""How much room there is, and how much of it a block of each group takes."""


class SharedRoom:
    """What may still be stored by all bounds together. Owns what is left of each."""

    def __init__(self, bounds: Sequence[Bound]) -> None:
        self._left = [(sizes, [room]) for room, sizes in bounds]

    def take(self, group: int, num_blocks: int) -> int:
        """Take room for as many of these blocks of a group as fit; returns how many do."""
        for sizes, (left,) in self._left:
            if sizes[group]:
                num_blocks = min(num_blocks, max(0, left) // sizes[group])
        for sizes, left_of in self._left:
            left_of[0] -= num_blocks * sizes[group]
        return num_blocks


def usable(
    groups: Sequence[reach.Group],
    todo: Mapping[int, range],
    held: Sequence[reach.BoolArray],
    new: Sequence[reach.BoolArray],
    bounds: Sequence[Bound],
    *,
    above: int,
    alignment: int,
) -> dict[int, range] | None:
    """Which blocks to store of those ``todo``, by group; None if no hit above so many tokens is.

    ``held`` and ``new`` are as for :func:`reach.longest_within`. First comes what the longest hit
    reads for which there is room, then what leads on from there, then what serves shorter ones. If
    there is room for no hit, a part of the longest one: the rest of it another time.
    """
    tokens = reach.longest_within(groups, held, new, bounds, above=above, alignment=alignment)
    is_whole = tokens > above
    if not is_whole:
        tokens = reach.longest_within(groups, held, new, (), above=above, alignment=alignment)
        if tokens == above:
            return None
    room, spans = SharedRoom(bounds), {}
    full = [g for g in todo if isinstance(groups[g], reach.FullAttention)]
    others = [g for g in todo if g not in full]
    for g in full:
        stop = _clip(tokens // groups[g].block_tokens, todo[g])
        spans[g] = range(todo[g].start, _until(new[g], todo[g].start, stop, room, g))
    for g in others:
        stop = _clip(tokens // groups[g].block_tokens, todo[g])
        read = reach.needed(groups[g], tokens)
        first = min(_clip(read.start, todo[g]), stop) if read else stop
        last = _until(new[g], first, stop, room, g)
        if last < stop and not new[g][first:last].any():  # nothing of it: it must not be passed by
            first = last = todo[g].start
        spans[g] = range(first, last)
    if is_whole:
        for g in full:
            stop = _until(new[g], spans[g].stop, todo[g].stop, room, g)
            spans[g] = range(spans[g].start, stop)
        for g in others:
            spans[g] = range(_from(new[g], todo[g].start, spans[g].start, room, g), spans[g].stop)
    return spans


def _clip(place: int, todo: range) -> int:
    return min(max(place, todo.start), todo.stop)


def _until(new: reach.BoolArray, first: int, stop: int, room: SharedRoom, group: int) -> int:
    """How far from a place on there is room; what there is room for is taken from it."""
    found = np.flatnonzero(new[first:stop])
    fits = room.take(group, len(found))
    return stop if len(found) <= fits else first + int(found[fits])


def _from(new: reach.BoolArray, first: int, stop: int, room: SharedRoom, group: int) -> int:
    """The same backwards: from where on, up to ``stop``, there is room."""
    found = np.flatnonzero(new[first:stop])
    fits = room.take(group, len(found))
    return first if len(found) <= fits else first + int(found[-fits - 1]) + 1


class OnDevice:
    """Hints for blocks that only the device has, for stores that no request orders.

    With lazy stores a block is stored when the engine is about to drop it, mostly long after its
    request has ended. Until then this remembers which blocks must not be stored (unless another
    request that may be stored has them too), and for the others the request with hints or tenant.
    Owns up to ``most_keys`` of each kind, the latest; more than the device has blocks.
    """

    def __init__(self, most_keys: int, hash_tokens: int) -> None:
        self._most_keys = most_keys
        self._hash_tokens = hash_tokens
        self._bounded: dict[Any, int] = {}  # live, and how many keys are withheld so far
        self._withheld: dict[Key, Any] = {}  # the oldest first, as in the next
        self._hinted: dict[Key, Any] = {}

    def __len__(self) -> int:
        """How many keys are remembered in all."""
        return len(self._withheld) + len(self._hinted)

    def opened(self, request: Any) -> None:
        """Only some of its blocks may be stored: others are withheld as soon as there are any."""
        self._bounded[request] = 0

    def ended(self, request: Any) -> None:
        """What it has computed may be dropped from now on, and is stored before if it may be."""
        hints = request.hints
        if hints is None and not self._withheld:
            return
        keys = allowed = request.chain.keys()
        if hints is not None:
            request.chain = keys  # what the engine knows of it is the engine's to forget
            if hints.max_store_tokens is not None:
                allowed = keys[: hints.max_store_tokens // self._hash_tokens]
        for key in allowed if self._withheld else ():
            self._withheld.pop(key, None)
        if request in self._bounded:
            self._withhold(request)
            del self._bounded[request]
        if hints is not None and (hints.shapes_what_stays or request.tenant):
            self._note(self._hinted, keys, request)

    def may_store(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key of a device block, whether its block may be stored."""
        for request in self._bounded:
            self._withhold(request)
        if not self._withheld:
            return np.ones(len(keys), dtype=bool)
        return np.fromiter((key not in self._withheld for key in keys), dtype=bool, count=len(keys))

    def by_request(
        self, keys: Keys, chosen: npt.NDArray[np.int64]
    ) -> list[tuple[Any, npt.NDArray[np.int64]]]:
        """The chosen keys' places, by the request with hints for them; in their order."""
        if not self._hinted:
            return [(None, chosen)]
        parts: dict[Any, list[int]] = {}
        for at in chosen.tolist():
            parts.setdefault(self._hinted.get(keys[at]), []).append(at)
        return [(request, np.array(part, dtype=np.int64)) for request, part in parts.items()]

    def _withhold(self, request: Any) -> None:
        """Its own blocks behind those that may be stored; as many as it has by now."""
        first = max(request.hints.max_store_tokens, request.own_from or 0) // self._hash_tokens
        first = max(first, self._bounded[request])
        if len(request.chain) > first:
            self._note(self._withheld, request.chain.keys()[first:], None)
            self._bounded[request] = len(request.chain)

    def _note(self, where: dict[Key, Any], keys: Keys, value: Any) -> None:
        for key in keys:
            where.pop(key, None)
            where[key] = value
        while len(where) > self._most_keys:
            del where[next(iter(where))]


_Part = tuple[int, range, npt.NDArray[np.int64]]
"""Blocks of a group that are to be stored: their places, and the device blocks they are in."""

_NO_BOUND = 1 << 40

_SHARE, _LEAST_BLOCKS = 1 / 4, 64
"""Of the device's blocks: so many may be in the hands of stores, where no setting says how many.

A quarter of a small device would leave most of a request unstored."""


NEVER = 1 << 60
"""Tokens: more than any request has."""


@dataclass(eq=False, slots=True)
class Progress:
    """What of one request needs no more storing. Owns that count; the blocks are the engine's.

    ``stored`` are the blocks that are done with, by group, and ``tokens`` the leading tokens that
    are done with in every group. ``past`` tokens it had, on the device or stored, when it came.
    ``since``: from there on count the tokens that make storing worth a call. One that
    ``is_outdated`` has device blocks from before a reset: nothing of them is stored. At most
    ``most_tokens`` are ever stored.
    """

    stored: list[int]
    most_tokens: int = NEVER
    tokens: int = 0
    past: int = 0
    since: int = 0
    is_outdated: bool = False

    @property
    def next_from(self) -> int:
        """``since``; never worth another call, once all that may be is stored."""
        return NEVER if self.tokens >= self.most_tokens else self.since

    def begin_at(self, num_tokens: int) -> None:
        """It has these tokens without computing them."""
        self.past = self.since = num_tokens

    def renew(self) -> None:
        """It starts from nothing: what a reset said about its blocks no longer counts."""
        self.since = 0
        if self.is_outdated:
            self.is_outdated = False
            self.stored = [0] * len(self.stored)
            self.tokens = 0

    def go_on(self, other: Progress) -> None:
        """It continues where another request ended, and stores what that one has left."""
        self.stored = list(other.stored)
        self.tokens = other.tokens
        self.past = other.past
        self.is_outdated |= other.is_outdated
        self.since = self.tokens or self.past


class Stores:
    """Turns computed blocks into store orders. Owns admission, the bounds and the lazy watermark.

    Stores are the first to wait: while the bounds are reached nothing is ordered, and an eager
    request asks again in its next step.
    """

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        transfers: Transfers,
        config: Config,
        shape: EngineShape,
        on_device: OnDevice | None = None,
    ) -> None:
        """``on_device`` knows what was said of blocks that are offered; None where none are."""
        self.is_lazy = config.store_mode == "lazy"
        self.on_device = on_device
        self.admission = SeenOften(config.store_threshold, num_keys=pool.num_slots)
        self.num_shed = 0
        self._matcher = matcher
        self._pool = pool
        self._transfers = transfers
        bound = shape.bound(config.max_storing_blocks, _SHARE)
        is_given = config.max_storing_blocks is not None
        self._max_blocks = bound if is_given or bound is None else max(bound, _LEAST_BLOCKS)
        self._max_bytes = config.max_bytes_in_flight
        self._block_bytes = shape.block_bytes
        most = self._max_blocks if self._max_blocks is not None else 1 << 20
        self._watermark = Watermark(most=most)

    # -- eager ----------------------------------------------------------------------------------

    def computed(
        self,
        request: Any,
        stored: list[int],
        keys: Keys,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> tuple[Ordered, ...]:
        """Order the whole blocks below ``num_tokens`` after the ``stored`` ones of each group.

        ``stored`` is moved on. A table that will not do is refused before anything is claimed.
        """
        parts = []
        for g, group in enumerate(self._matcher.groups):
            todo = range(stored[g], num_tokens // group.block_tokens)
            if todo:
                if len(tables[g]) < todo.stop:
                    raise InputError(
                        f"group {g}'s block table has {len(tables[g])} blocks, the first "
                        f"{num_tokens} tokens need {todo.stop}"
                    )
                parts.append((g, todo, checked_blocks(g, tables[g], todo)))
        chosen = None
        if len(stored) > 1 and not self._all_fit(parts):
            chosen = self._usable(stored, keys, parts, num_tokens)
        ordered = []
        for g, todo, blocks in parts:
            if chosen is not None:
                blocks = blocks[chosen[g].start - todo.start : chosen[g].stop - todo.start]
                todo = chosen[g]
            slot_keys = self._matcher.slot_keys(g, keys, todo)
            count = len(todo)
            if chosen is None and count > self._room(g):
                count = self._fitting(g, slot_keys)
            if count < len(todo):
                self.num_shed += 1
                slot_keys, blocks, todo = slot_keys[:count], blocks[:count], todo[:count]
            stored[g] = todo.stop
            if count:
                order = self._order(request, g, keys, slot_keys, todo, blocks)
                if order is not None:
                    ordered.append(order)
        return tuple(ordered)

    def _all_fit(self, parts: Sequence[_Part]) -> bool:
        """Whether the bounds allow all of it, whatever is kept already."""
        return all(
            sum(len(todo) * sizes[g] for g, todo, _ in parts) <= room
            for room, sizes in self._bounds()
        )

    def _usable(
        self, stored: Sequence[int], keys: Keys, parts: Sequence[_Part], num_tokens: int
    ) -> dict[int, range] | None:
        """What to store of more than the bounds allow, by group; see :func:`usable`."""
        matcher = self._matcher
        low = min(
            count * group.block_tokens for count, group in zip(stored, matcher.groups, strict=True)
        )
        tables = {g: (todo, blocks) for g, todo, blocks in parts}
        held, new = [], []
        for g, group in enumerate(matcher.groups):
            end = num_tokens // group.block_tokens
            first = max(0, group.first_token(low)) // group.block_tokens
            if isinstance(group, reach.FullAttention) or first > stored[g]:
                # Full attention: what is stored is taken for there. That may be more than is
                # computed: from others, or from before the request was set back.
                first = min(stored[g], end)
            slot_keys = matcher.slot_keys(g, keys, range(first, end))
            known = self._pool.known(slot_keys)
            fresh = np.zeros(end - first, dtype=np.bool_)
            if g in tables:
                todo, blocks = tables[g]
                fresh[todo.start - first :] = self._wanted(
                    g, todo, blocks, slot_keys[todo.start - first :]
                )
            before = np.ones(first, dtype=np.bool_)
            held.append(np.concatenate((before, known | fresh)))
            new.append(np.concatenate((~before, fresh & ~known)))
        chosen = usable(
            matcher.groups,
            {g: todo for g, todo, _ in parts},
            held,
            new,
            self._bounds(),
            above=low,
            alignment=matcher.alignment,
        )
        if chosen is not None:
            self.num_shed += any(chosen[g] != todo for g, todo, _ in parts)
        return chosen

    def skip_known(self, stored: list[int], keys: Keys, num_tokens: int) -> None:
        """Count the whole blocks below ``num_tokens`` as stored, group by group, if they are kept.

        Only where every hit reads every block: what is kept of a conversation is its beginning
        then, so the last of these blocks speaks for all of them.
        """
        for g, group in enumerate(self._matcher.groups):
            count = num_tokens // group.block_tokens
            if count > stored[g] and isinstance(group, reach.FullAttention):
                slot_keys = self._matcher.slot_keys(g, keys, range(count))
                if self._pool.known(slot_keys[-1:])[0]:
                    self._pool.touch(slot_keys)  # they are in use: keep them longer
                    stored[g] = count

    def _fitting(self, g: int, slot_keys: Keys) -> int:
        """How many of these, from the first on, the bounds allow; what is kept takes no room."""
        room, new = self._room(g), np.flatnonzero(~self._pool.known(slot_keys))
        return len(slot_keys.array) if len(new) <= room else int(new[room])

    def _order(
        self,
        request: Any,
        g: int,
        keys: Keys,
        slot_keys: Keys,
        todo: range,
        blocks: npt.NDArray[np.int64],
    ) -> Ordered | None:
        matcher = self._matcher
        chained = isinstance(matcher.groups[g], reach.FullAttention)
        wanted = self._wanted(g, todo, blocks, slot_keys)
        asked, chosen, found = slot_keys, None, None
        if not wanted.all():
            if chained:  # what follows a block left out could never be reached
                found = self._pool.find(slot_keys)
                wanted = np.logical_and.accumulate(wanted | (found != NO_SLOT))
            chosen = np.flatnonzero(wanted)
            asked = slot_keys.take(chosen)
            found = None if found is None else found[chosen]
        parent = matcher.key_before(g, keys, todo.start) if chained and todo.start else None
        if parent is not None and not matcher.has(parent):
            return None  # the same, and it would push out what can be reached
        lease = self._pool.reserve(
            asked,
            parent=parent,
            chained=chained,
            found=found,
            tenant=request.tenant,
            must_stay=request.hints is not None and request.hints.pin_seconds is not None,
        )
        if lease is None:
            return None
        at = lease.positions if chosen is None else chosen[lease.positions]
        if len(at) < len(todo):
            blocks, slot_keys = blocks[at], slot_keys.take(at)
        transfer = self._transfers.store(g, lease, blocks, request)
        request.num_storing += 1
        return Ordered(g, blocks, transfer, at + todo.start, slot_keys, request)

    def _wanted(
        self, g: int, todo: range, blocks: npt.NDArray[np.int64], slot_keys: Keys
    ) -> npt.NDArray[np.bool_]:
        """Which of these blocks are there, worth storing, and were asked for often enough."""
        wanted = blocks != NO_BLOCK
        if not self._matcher.is_full:
            wanted &= self._matcher.worth_storing(g, todo)
        if self.admission.counts:
            wanted &= self.admission.admits(slot_keys)
        return wanted

    # -- lazy -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many blocks of its free queue the engine should offer in this step."""
        return self._watermark.depth if self.is_lazy else 0

    def demand(self, num_blocks: int) -> None:
        """The engine took this many device blocks in the step that just passed."""
        self._watermark.demand(num_blocks)

    def offered(self, g: int, keys: Keys, blocks: BlockTable) -> tuple[Ordered, ...]:
        """Order those of the blocks at the head of the free queue that are not stored yet."""
        if len(keys) != len(blocks):
            raise InputError(f"{len(keys)} keys for {len(blocks)} offered blocks; pair them up")
        if not 0 <= g < len(self._matcher.groups):
            raise InputError(f"there are {len(self._matcher.groups)} groups, got group {g}")
        device = checked_blocks(g, blocks, range(len(blocks)))
        if not self.is_lazy or not len(keys):
            return ()
        slot_keys = self._matcher.scoped(g, keys)
        wanted = ~self._pool.known(slot_keys) & self.admission.admits(slot_keys)
        if self.on_device is not None:
            wanted &= self.on_device.may_store(keys)
        # The queue may hold the same content twice.
        first = {key: at for at, key in reversed(list(enumerate(slot_keys)))}
        wanted &= np.isin(np.arange(len(keys)), list(first.values())) & (device != NO_BLOCK)
        # Soonest to go last: the pool keeps the front of a batch longest, as the front of a chain.
        chosen = np.flatnonzero(wanted)[: self._room(g)][::-1]
        parts = self.on_device.by_request(keys, chosen) if self.on_device else [(None, chosen)]
        ordered = []
        for request, part in parts:
            tenant = 0 if request is None else request.tenant
            lease = self._pool.reserve(slot_keys.take(part), chained=False, tenant=tenant)
            if lease is not None:
                at = part[lease.positions]
                transfer = self._transfers.store(g, lease, device[at], request)
                if request is not None:
                    request.num_storing += 1
                ordered.append(Ordered(g, device[at], transfer, at, slot_keys.take(at)))
        return tuple(ordered)

    # -- bounds ---------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the bounds let some group store nothing more for now.

        With nothing on its way they never will: a request would wait for ever.
        """
        if not self._transfers.blocks_from_device and not self._transfers.num_bytes:
            return False
        return any(self._room(g) <= 0 for g in range(len(self._matcher.groups)))

    def _room(self, g: int) -> int:
        """How many blocks of this group may be ordered now without passing the bounds."""
        room = _NO_BOUND
        if self._max_blocks is not None:
            room = self._max_blocks - self._transfers.blocks_from_device
        if self._block_bytes[g]:
            transfers = self._transfers
            flying = transfers.bytes_to_device + transfers.bytes_from_device
            room = min(room, (self._max_bytes - flying) // self._block_bytes[g])
        return max(0, room)

    def _bounds(self) -> list[Bound]:
        """The same for all groups together."""
        transfers, bounds = self._transfers, list[Bound]()
        if self._max_blocks is not None:
            room = max(0, self._max_blocks - transfers.blocks_from_device)
            bounds.append((room, (1,) * len(self._block_bytes)))
        if any(self._block_bytes):
            bounds.append((max(0, self._max_bytes - transfers.num_bytes), self._block_bytes))
        return bounds


# -- stores of what ended requests left ---------------------------------------------------------

WAIT_SECONDS = 2.0
"""How long a short rest waits for the next turn: programs that call tools answer as fast."""

SOON_SECONDS = 0.02
"""How long others wait: until the requests that took their place are on their way."""

STORE_TOKENS = 4096
"""A running request is stored when it has this many more tokens, and when it ends: every store
costs the scheduler the same, however few blocks it has. Nothing is lost meanwhile but what a
preemption takes, because blocks in use stay on the device."""

_HURRY = 8
"""Where the engine evicts, it may preempt as well: so many times as often."""

_PER_STEP = 2
"""So many that have waited long enough are stored beside a model that runs."""

_MOST_WAITING = 64
"""So many wait for a next turn."""

_HELD_SHARE = 8
"""At most one in so many device blocks is held."""


@dataclass(frozen=True, eq=False)
class Deferred:
    """What one ended request leaves: its blocks below ``num_tokens`` that are not stored.

    ``key`` is that of the last of them, which covers all tokens before it. ``tables`` name the
    blocks where they are ``held``; else they are looked for when they are stored.
    """

    request: Any
    num_tokens: int
    key: Key
    since: float
    tables: Sequence[BlockTable] | None = None
    held: tuple[DeviceBlocks, ...] = ()


class DeferredStores:
    """What ended requests have not stored yet, until there is a good moment for it.

    ::

        ended ──┬─> waits for the next turn ──┬─> it comes: that request stores both at once
                │   (while the engine evicts  └─> the engine rests or evicts, or a while has passed:
                │    nothing)                     stored
                └─> held on the device ─────────> stored as soon as others are on their way

    Every store costs the scheduler the same, however few blocks it has, and requests end where
    others begin. So a short rest of a turn waits, and many never need a store of their own, because
    the next turn comes first. Nothing holds its blocks: they are looked for by content when its
    time comes. Where the engine evicts, blocks go too fast for that: a rest is held and stored at
    once. Requests end themselves; the blocks are the engine's.
    """

    def __init__(
        self,
        engine: EngineBlocks,
        *,
        least_tokens: int,
        is_full: bool,
        num_device_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        """``is_full`` says that no block is given up while its request runs.

        A window may pass a block before its turn comes: such requests store block by block.
        """
        self.engine = engine
        self.stores_late = is_full
        num_blocks = max(1, STORE_TOKENS // least_tokens) if is_full else 1
        self.store_step = least_tokens * num_blocks
        self._hasty_step = least_tokens * max(1, num_blocks // _HURRY)
        self._most_held = num_device_blocks // _HELD_SHARE
        self._clock = clock
        self._waiting: dict[Key, Deferred] = {}  # both the oldest first
        self.held: list[Deferred] = []
        """Those whose device blocks are held, which the engine may need any time."""
        self.is_wanted = False
        """Whether the engine needs the blocks: then none is held any longer."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self.held)

    @property
    def step(self) -> int:
        """How many tokens a running request stores at once, counted from ``Progress.next_from``."""
        return self._hasty_step if self.engine.evicts else self.store_step

    def wait(self, request: Any, num_tokens: int, key: Key) -> Deferred | None:
        """Let a short rest wait; returns what waited with the same end: one is enough."""
        twin = self._waiting.pop(key, None)
        self._waiting[key] = Deferred(request, num_tokens, key, self._clock())
        return twin

    def hold(
        self,
        request: Any,
        num_tokens: int,
        key: Key,
        tables: Sequence[BlockTable],
        held: tuple[DeviceBlocks, ...],
    ) -> None:
        """Remember one whose blocks are held."""
        self.held.append(Deferred(request, num_tokens, key, self._clock(), tables, held))

    def put_back(self, rests: Sequence[Deferred]) -> None:
        """They could not be stored whole yet: again in the next step, and before all others."""
        self._waiting = {rest.key: rest for rest in rests if not rest.held} | self._waiting
        self.held = [rest for rest in rests if rest.held] + self.held

    def take_continued(self, chain: Sequence[Key] | Any, num_keys: int) -> Deferred | None:
        """What waits for a request that goes on after so many blocks of its chain."""
        if not self._waiting or num_keys > len(chain):  # an engine may have more than has keys
            return None
        return self._waiting.pop(chain[num_keys - 1], None)

    def take_due(self, *, is_idle: bool) -> list[Deferred]:
        """What is to be stored in this step, the oldest first."""
        if not (self._waiting or self.held):
            return []
        now, engine, due = self._clock(), self.engine, list[Deferred]()
        if self.held:
            is_short = engine.num_free < self._most_held or engine.num_held > self._most_held
            takes_held = is_idle or self.is_wanted or is_short
            due = [rest for rest in self.held if takes_held or now >= rest.since + SOON_SECONDS]
        self.is_wanted = False
        takes_waiting = is_idle or engine.evicts
        surplus = len(self._waiting) - _MOST_WAITING
        for number, rest in enumerate(self._waiting.values()):
            is_ripe = now >= rest.since + WAIT_SECONDS or number < surplus
            if not takes_waiting and not (is_ripe and number < max(_PER_STEP, surplus)):
                break
            due.append(rest)
        for rest in due:
            self._remove(rest)
        return due

    def drop(self, request: Any) -> list[Deferred]:
        """What one request left, which is not to be stored any more."""
        rests = [rest for rest in (*self.held, *self._waiting.values()) if rest.request is request]
        for rest in rests:
            self._remove(rest)
        return rests

    def take_all(self) -> list[Deferred]:
        """Everything, due or not: what is left of before is not to be stored any more."""
        rests = [*self.held, *self._waiting.values()]
        self.held, self._waiting = [], {}
        return rests

    def _remove(self, rest: Deferred) -> None:
        if rest.held:
            self.held.remove(rest)
        else:
            del self._waiting[rest.key]
