"""Stores: which computed blocks are stored, and when; deferred stores of ended requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach
from kvferry.cache.policies.admission import SeenOften
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

_SHARE, _LEAST_BLOCKS = 1 / 4, 64
"""Share of the device's blocks that stores may occupy at once, and the least such bound in blocks,
if no setting bounds them. A quarter of a small device would leave most of a request unstored."""


NEVER = 1 << 60
"""A number of tokens that no request reaches."""


@dataclass(eq=False, slots=True)
class Progress:
    """How far one request is stored. Owns the counts; the engine owns the blocks.

    ``stored`` counts the leading blocks that are done (need no store any more), by group.
    ``tokens`` are the leading tokens that are done in every group. ``past`` leading tokens were on
    the device or in the host when the request arrived. Tokens after ``since`` count towards the
    next store call. ``is_outdated``: the device blocks are from before a reset, so none is stored.
    At most ``most_tokens`` are ever stored.
    """

    stored: list[int]
    most_tokens: int = NEVER
    tokens: int = 0
    past: int = 0
    since: int = 0
    is_outdated: bool = False

    @property
    def next_from(self) -> int:
        """``since``, or ``NEVER`` once all tokens that may be stored are."""
        return NEVER if self.tokens >= self.most_tokens else self.since

    def begin_at(self, num_tokens: int) -> None:
        """Note that the request has its first ``num_tokens`` without computing them."""
        self.past = self.since = num_tokens

    def renew(self) -> None:
        """Start over without device blocks: after a reset, new blocks may be stored again."""
        self.since = 0
        if self.is_outdated:
            self.is_outdated = False
            self.stored = [0] * len(self.stored)
            self.tokens = 0

    def go_on(self, other: Progress) -> None:
        """Continue after an ended request, and take over its deferred stores."""
        self.stored = list(other.stored)
        self.tokens = other.tokens
        self.past = other.past
        self.is_outdated |= other.is_outdated
        self.since = self.tokens or self.past


class Stores:
    """Turns computed blocks into store orders. Owns admission and the bounds on stores.

    While a bound is reached no store is ordered, and the request tries again in its next step.
    Stores also wait while host memory is being made ready: otherwise a new server would keep only
    the first few blocks of its first prompt.
    """

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        transfers: Transfers,
        config: Config,
        shape: EngineShape,
        clock: Callable[[], float],
    ) -> None:
        self.admission = SeenOften(config.store_threshold, num_keys=pool.num_slots)
        self.num_shed = 0
        self.deferred: DeferredStores | None = None
        """Where the engine defers stores, they also wait for host slots to become ready."""
        self._slots_seen, self._slots_due = -1, 0.0  # how many were ready, and that wait's end
        self._clock = clock
        self._was_cut = False  # whether the bounds cut the last store short
        self._matcher = matcher
        self._pool = pool
        self._transfers = transfers
        bound = shape.bound(config.max_storing_blocks, _SHARE)
        is_given = config.max_storing_blocks is not None
        self._max_blocks = bound if is_given or bound is None else max(bound, _LEAST_BLOCKS)
        self._max_bytes = config.max_bytes_in_flight
        self._block_bytes = shape.block_bytes

    def computed(
        self,
        request: Any,
        stored: list[int],
        keys: Keys,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> tuple[Ordered, ...]:
        """Order each group's whole blocks after its ``stored`` ones, up to ``num_tokens``.

        Advances ``stored``. A single group stores as many blocks as the bounds allow. Several
        groups store all of their blocks, or none while a bound is reached: a part of each would
        serve no request. A bad block table raises InputError before any slot is reserved.
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
        self._was_cut = False
        if len(stored) > 1 and self._must_wait(parts):
            self._was_cut = True
            self.num_shed += 1
            return ()
        ordered = []
        for g, todo, blocks in parts:
            slot_keys = self._matcher.names[g].of(keys, todo)
            count = len(todo)
            if len(stored) == 1 and count > self._room(g):
                count = self._fitting(g, slot_keys)
            if count < len(todo):
                self._was_cut = True
                self.num_shed += 1
                slot_keys, blocks, todo = slot_keys[:count], blocks[:count], todo[:count]
            stored[g] = todo.stop
            if count:
                order = self._order(request, g, keys, slot_keys, todo, blocks)
                if order is not None:
                    ordered.append(order)
        return tuple(ordered)

    def skip_known(self, stored: list[int], keys: Keys, num_tokens: int, past: int) -> None:
        """Count the whole blocks below ``num_tokens`` as stored, group by group, if they are kept.

        Else those below the ``past``. Only where every hit reads every block: what is kept of a
        conversation is its beginning then, so the last of the past speaks for all of it.
        """
        for g, group in enumerate(self._matcher.groups):
            names, count = self._matcher.names[g], past // group.block_tokens
            rest = names.of(keys, range(count, num_tokens // group.block_tokens))
            # All of them: a block whose bytes were lost is stored anew.
            if len(rest) and self._pool.known(rest[-1:])[0] and self._pool.known(rest).all():
                count += len(rest)
            if count > stored[g] and isinstance(group, reach.FullAttention):
                slot_keys = names.of(keys, range(count))
                if self._pool.known(slot_keys[-1:])[0]:
                    self._pool.touch(slot_keys)  # they are in use: keep them longer
                    stored[g] = count

    def _fitting(self, g: int, slot_keys: Keys) -> int:
        """Return how many leading blocks the bounds allow; blocks already in the host are free."""
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
        if np.count_nonzero(wanted) < len(wanted):
            if chained:  # blocks behind a skipped one could never be reached
                found = self._pool.find(slot_keys)
                wanted = np.logical_and.accumulate(wanted | (found != NO_SLOT))
            chosen = np.flatnonzero(wanted)
            asked = slot_keys.take(chosen)
            found = None if found is None else found[chosen]
        parent = matcher.names[g].before(keys, todo.start) if chained and todo.start else None
        if parent is not None and not matcher.has(parent):
            return None  # unreachable, too, and storing would evict blocks that can be reached
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
        """Return which blocks the engine has, a hit can read, and admission lets in."""
        wanted = blocks != NO_BLOCK
        if not self._matcher.is_full:
            wanted &= self._matcher.worth_storing(g, todo)
        if self.admission.counts:
            wanted &= self.admission.admits(slot_keys)
        return wanted

    # -- bounds ---------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the bounds cut the last store short, and completions or new slots make room."""
        return self._was_cut and (self._is_busy or self._grows())

    def _must_wait(self, parts: Sequence[tuple[int, range, Any]]) -> bool:
        """Return whether a store of these parts of several groups must wait for room."""
        if self._grows() and sum(len(todo) for _, todo, _ in parts) > self._pool.num_free:
            return True
        return self._is_busy and not all(self._room(g) for g, _, _ in parts)

    @property
    def _is_busy(self) -> bool:
        return self._transfers.blocks_from_device > 0 or self._transfers.num_bytes > 0

    def _room(self, g: int) -> int:
        """Return how many blocks of this group may be ordered now within the bounds."""
        room = NEVER
        if self._max_blocks is not None:
            room = self._max_blocks - self._transfers.blocks_from_device
        if self._block_bytes[g]:
            transfers = self._transfers
            num_bytes = transfers.bytes_to_device + transfers.bytes_from_device
            room = min(room, (self._max_bytes - num_bytes) // self._block_bytes[g])
        if self._grows():
            room = min(room, self._pool.num_free)
        return max(0, room)

    def _grows(self) -> bool:
        """Return whether stores wait for host slots to become ready; the wait is bounded."""
        deferred, pool = self.deferred, self._pool
        if pool.num_ready == pool.num_slots or deferred is None or deferred.lacks_blocks:
            return False
        if self._slots_seen != pool.num_ready:
            self._slots_seen, self._slots_due = pool.num_ready, self._clock() + SLOTS_SECONDS
        return self._clock() < self._slots_due


# -- deferred stores of ended requests ----------------------------------------------------------

SLOTS_SECONDS = 1.0
"""Seconds that stores wait for the next slots of host memory that is being made ready."""

WAIT_SECONDS = 2.0
"""Seconds that a few unstored tokens wait for the next turn: agents that call tools are as fast."""

SOON_SECONDS = 0.02
"""Seconds that held blocks wait: until the requests that replaced theirs are being computed."""

STORE_TOKENS = 4096
"""New tokens after which a running request is stored; the rest is stored when it ends. Until then
only a preemption takes its device blocks."""

_HURRY = 32
"""How many times as often running requests are stored while the engine evicts: it may preempt, and
the next turn of a conversation may come before the rest of this one is stored."""

_PER_STEP = 2
"""Requests stored per step of a busy engine, once they have waited ``WAIT_SECONDS``."""

_MOST_WAITING = 64
"""Deferred requests that may wait for a next turn; the oldest beyond that are stored."""

_HELD_SHARE = 8
"""1/8 of the device's blocks: with fewer free or more held, held blocks are stored at once."""


@dataclass(frozen=True, eq=False)
class Deferred:
    """The deferred store of one ended request: its unstored blocks below ``num_tokens``.

    ``key`` is the last block's, which covers all tokens before it. ``tables`` are given if the
    device blocks are ``held``; otherwise the engine is asked for them at the store.
    """

    request: Any
    num_tokens: int
    key: Key
    since: float
    tables: Sequence[BlockTable] | None = None
    held: tuple[DeviceBlocks, ...] = ()


class DeferredStores:
    """The deferred stores of ended requests. Owns when they are due; not requests, nor blocks.

    ::

        ended ──┬─> waits for the next turn ──┬─> it arrives: its request stores both at once
                │   (few unstored tokens, the └─> the engine is idle or evicts, or 2 s have passed:
                │    engine evicts nothing)       stored
                └─> held on the device ─────────> stored 20 ms later, when others are being computed

    Every store costs the scheduler the same, however few blocks it has. So a few unstored tokens
    wait for the next turn without holding device blocks: the engine's cache still finds those by
    content. While the engine evicts, it would lose them too soon.
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
        """``is_full``: all groups are full attention, so none frees a block while its request runs.

        A window may free a block before a deferred store: other models store block by block.
        """
        self.engine = engine
        self.stores_late = is_full
        num_blocks = max(1, STORE_TOKENS // least_tokens) if is_full else 1
        self.store_step = least_tokens * num_blocks
        self._hasty_step = least_tokens * max(1, num_blocks // _HURRY)
        self._most_held = num_device_blocks // _HELD_SHARE
        self._clock = clock
        self._rests: list[Deferred] = []  # the oldest first
        self.num_held = 0
        """Deferred stores that hold device blocks, which the engine may need at any time."""
        self.is_wanted = False
        """Whether the engine needs the held blocks now: the next step stores or drops them."""

    def __len__(self) -> int:
        return len(self._rests)

    @property
    def step(self) -> int:
        """New tokens from ``Progress.next_from`` on after which a running request is stored."""
        return self._hasty_step if self.engine.evicts else self.store_step

    @property
    def lacks_blocks(self) -> bool:
        """Whether the engine needs blocks, or has so few free that none should be held long."""
        return self.is_wanted or self.engine.num_free < self._most_held

    def add(
        self,
        request: Any,
        num_tokens: int,
        key: Key,
        tables: Sequence[BlockTable] | None = None,
        held: tuple[DeviceBlocks, ...] = (),
    ) -> Deferred | None:
        """Add a deferred store: with ``held`` blocks, or without, to wait for the next turn.

        Returns the waiting one of the same blocks, removed, if there was one.
        """
        twin = self._take_waiting(key) if self._rests and not held else None
        self._rests.append(Deferred(request, num_tokens, key, self._clock(), tables, held))
        self.num_held += bool(held)
        return twin

    def put_back(self, rests: Sequence[Deferred]) -> None:
        """Put back deferred stores that did not fit the bounds: they are first in the next step."""
        self._rests = [*rests, *self._rests]
        self.num_held += sum(bool(rest.held) for rest in rests)

    def take_continued(self, chain: Sequence[Key] | Any, num_keys: int) -> Deferred | None:
        """Take the deferred store that ends with the first ``num_keys`` keys of this chain."""
        if not self._rests or num_keys > len(chain):  # computed tokens may exceed the keys
            return None
        return self._take_waiting(chain[num_keys - 1])

    def _take_waiting(self, key: Key) -> Deferred | None:
        for rest in self._rests:
            if rest.key == key and not rest.held:
                self._rests.remove(rest)
                return rest
        return None

    def take_due(self, *, is_idle: bool) -> list[Deferred]:
        """Take the deferred stores that are due in this step: held ones first, oldest first."""
        if not self._rests:
            return []
        now, engine = self._clock(), self.engine
        due, waiting = list[Deferred](), list[Deferred]()
        soon = now - SOON_SECONDS
        if is_idle or self.lacks_blocks or engine.num_held > self._most_held:
            soon = now
        for rest in self._rests:
            if not rest.held:
                waiting.append(rest)
            elif rest.since <= soon:
                due.append(rest)
        if is_idle or engine.evicts:
            due += waiting
        else:
            surplus = len(waiting) - _MOST_WAITING
            for number, rest in enumerate(waiting[: max(_PER_STEP, surplus)]):
                if number < surplus or now >= rest.since + WAIT_SECONDS:
                    due.append(rest)
        for rest in due:
            self._remove(rest)
        return due

    def drop(self, request: Any) -> list[Deferred]:
        """Remove and return the deferred stores of one request."""
        rests = [rest for rest in self._rests if rest.request is request]
        for rest in rests:
            self._remove(rest)
        return rests

    def take_all(self) -> list[Deferred]:
        """Remove and return all deferred stores, due or not."""
        rests, self._rests, self.num_held = self._rests, [], 0
        return rests

    def _remove(self, rest: Deferred) -> None:
        self._rests.remove(rest)
        self.num_held -= bool(rest.held)
