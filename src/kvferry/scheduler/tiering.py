"""The lower tiers: lookups, questions and promotions over all of them.

::

    device  <-- load --  host  <-- promote ---  lower tiers
            -- store -->       -- writeback -->

A block found only on a lower tier is first promoted: copied to a host slot, in pieces that can be
matched as each completes. Requests wait for promotions and for answers of keyed tiers; a block that
misses its deadline counts as missing. A tier that is unavailable on any rank is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.cache.events import EventKind
from kvferry.cache.policies.load_or_compute import BusyTime, Decision, LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.core.identity import new_epoch
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import Flags, KeyedTier, LowerTier, Move, Presence, SlotTier
from kvferry.scheduler.transfers import InFlight, Transfers
from kvferry.types import (
    HOST,
    NO_SLOT,
    Health,
    Opened,
    Question,
    Rank,
    Reset,
    SlotArray,
    TierName,
    TransferId,
)

_PIECE_BYTES = 16 << 20
"""Bytes of one piece of a promotion, so that the first is usable before the last arrives. Large
enough for a drive to be fast; small blocks share a piece."""

_PIECE_SLOTS = 32
"""Blocks of one piece if their size is not known."""

_PROMOTING_SHARE = 4
"""Promotions in flight may claim 1/4 of the host's slots: more would evict too much."""


@dataclass(frozen=True, eq=False)
class TierLookup:
    """Lookup results of some keys on each available tier, and on any of them."""

    tiers: Sequence[LowerTier]
    found: Sequence[Presence]
    readable: Flags
    unknown: Flags


@dataclass(eq=False, slots=True)
class GroupLookup:
    """Lookup results of one group's blocks from position ``first`` on, which have these keys.

    ``slots`` are host slots, including those still being written; ``cached``: which can be read.
    ``below`` are the results on lower tiers; None if no longer hit is possible.
    """

    first: int
    keys: Keys
    slots: SlotArray
    cached: Flags
    below: TierLookup | None = None

    def whole(self, flags: Flags, before: bool) -> Flags:
        """Return flags of all the group's blocks: ``before`` for each one ahead of ``first``."""
        return np.concatenate((np.full(self.first, before), flags))

    def part(self, blocks: range) -> slice:
        """Return the slice of the looked-up blocks that these blocks of the group are."""
        return slice(max(0, blocks.start - self.first), max(0, blocks.stop - self.first))


class RunBelow(NamedTuple):
    """A run of a group's blocks to promote where the host lacks them, behind ``parent``.

    ``chained``: each block needs the one before it.
    """

    group: GroupLookup
    part: slice
    parent: Key | None
    chained: bool


class LowerTiers:
    """Finds and promotes blocks of lower tiers. Leaves to :class:`Writeback` what is written there.

    Owns the tiers, the moves and questions in flight, and the budget of promotions. Orders go to
    ``transfers``.
    """

    def __init__(
        self,
        host: Pool,
        tiers: Sequence[LowerTier],
        transfers: Transfers,
        clock: Callable[[], float],
        worth: LoadOrCompute,
        *,
        slot_bytes: int = 0,
    ) -> None:
        """``worth`` learns the tiers' speeds; ``slot_bytes``: a block's size on one rank, or 0."""
        self._worth = worth
        self.tiers = tuple(tiers)
        self.keyed = tuple([tier for tier in self.tiers if isinstance(tier, KeyedTier)])
        self.pools = {tier.name: tier.pool for tier in self.tiers if tier.pool is not None}
        """The pools of slot tiers, by tier name."""
        self._slot_bytes = slot_bytes
        self.piece_slots = max(4, _PIECE_BYTES // slot_bytes) if slot_bytes else _PIECE_SLOTS
        self._busy = {tier.name: BusyTime() for tier in self.tiers}
        self._host = host
        self._transfers = transfers
        self._clock = clock
        self.moves: dict[TransferId, Move] = {}
        """Promotions and writebacks in flight; :class:`Writeback` adds the latter."""
        self._epoch = 0
        self._asking: dict[TransferId, tuple[LowerTier, list[Keys]]] = {}
        self._most_promoting = max(1, host.num_slots // _PROMOTING_SHARE)
        host.eviction.feeds_below = bool(self.tiers)
        self.reset_number = max([tier.reset_number for tier in self.tiers], default=0)
        """The greatest reset number that any tier is known to have; the next one is greater."""
        remains = tuple(tier.name for tier in self.tiers if tier.has_remains)
        if remains:
            transfers.forget(remains, Reset(new_epoch(self.reset_number), 0))

    # -- lookup ---------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> TierLookup:
        """Look up a request's keys on the available tiers, without asking them."""
        now = self._clock()
        tiers, found = [], []
        readable, unknown = np.zeros((2, len(keys.array)), dtype=bool)
        for tier in self.tiers:
            if not tier.ailment:
                each = tier.lookup(keys, now)
                readable |= each.readable
                unknown |= each.unknown
                tiers.append(tier)
                found.append(each)
        return TierLookup(tiers, found, readable, unknown)

    @property
    def away(self) -> tuple[str, ...]:
        """The unavailable tiers, each with its reason."""
        return tuple(f"{tier.name}: {tier.ailment}" for tier in self.tiers if tier.ailment)

    def has_out_of_reach(self, key: Key) -> bool:
        """Return whether an unavailable tier is known to have this block."""
        keys, now = Keys.from_bytes((key,)), self._clock()
        return any(tier.ailment and tier.lookup(keys, now).readable[0] for tier in self.tiers)

    # -- asking ---------------------------------------------------------------------------------

    @property
    def can_be_asked(self) -> bool:
        """Whether any keyed tier is available."""
        return any(not tier.ailment for tier in self.keyed)

    def ask(self, wanted: Keys) -> set[TransferId]:
        """Ask the tiers for these distinct keys; return the questions to wait for.

        A key that is already being asked for is not asked again: the caller waits for that answer.
        """
        questions = set()
        now = self._clock()
        for tier in self.tiers:
            if tier.ailment:
                continue
            rest = wanted.take(tier.lookup(wanted, now).unknown)
            for question_id, (asked, pieces) in self._asking.items():
                for piece in pieces if asked is tier else ():
                    is_asked = np.isin(rest.array[:, 0], piece.array[:, 0])
                    if is_asked.any():
                        questions.add(question_id)
                        rest = rest.take(~is_asked)
            if len(rest):
                question_id = self._transfers.ask(tier.name, rest)
                self._asking.setdefault(question_id, (tier, []))[1].append(rest)
                questions.add(question_id)
        return questions

    # -- promotion ------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Host slots that promotions may still claim now."""
        room = self._most_promoting
        for move in self.moves.values():
            if move.upward:
                room -= len(move.keys)
        return room

    def promote(self, runs: Sequence[RunBelow], room: int, *, tenant: int = 0) -> set[TransferId]:
        """Promote the blocks of the runs that the host lacks, into at most ``room`` host slots.

        The runs must be of a lookup just now. Returns the transfers to wait for, including those of
        other requests. It is empty if the host has no room.
        """
        transfers: set[TransferId] = set()
        for number, run in enumerate(runs):
            if self.moves:
                transfers |= self._bringing(run)
            room = self._promote(run, room, tenant, transfers, is_first=not number)
        return transfers

    def _promote(
        self, run: RunBelow, room: int, tenant: int, transfers: set[TransferId], *, is_first: bool
    ) -> int:
        """Promote one run and add its transfers to ``transfers``; return the room that is left."""
        group, part, parent, chained = run
        start, lookup, known = part.start, group.below, group.slots != NO_SLOT
        keys, num_keys = group.keys, len(known)
        assert lookup is not None
        while room > 0 and start < part.stop:
            stop = start + min(room, self.piece_slots, part.stop - start)
            if not known[start:stop].all():
                number, stop = _source(lookup, known, start, stop)
                if number is None:
                    break
                # Only the first may use the lookup: a reservation may evict blocks of later pieces.
                found = group.slots[start:stop] if is_first and start == part.start else None
                lease = self._host.reserve(
                    keys if stop - start == num_keys else keys[start:stop],
                    parent=parent,
                    chained=chained,
                    found=found,
                    tenant=tenant,
                )
                if lease is None:
                    break
                at = start + lease.positions
                if not lookup.found[number].readable[at].all():
                    lease.abort()  # the host has evicted blocks of the run since the lookup
                    break
                slots = lookup.found[number].slots
                src = slots[at] if len(slots) else slots
                coming = keys if len(at) == num_keys else keys.take(at)
                tier = lookup.tiers[number]
                transfer_id = self._transfers.move(tier.name, HOST, coming, tier.read(src), lease)
                self.moves[transfer_id] = Move(tier, coming, upward=True)
                self._host.log.append(EventKind.PROMOTE, keys=coming, detail=tier.name)
                self._busy[tier.name].begin(self._clock())
                transfers.add(transfer_id)
                room -= len(at)
                if len(at) < np.count_nonzero(~known[start:stop]):
                    break  # the host is full: blocks behind the missing ones could not be reached
            if stop < part.stop:
                parent = keys[stop - 1]
            start = stop
        return room

    def _bringing(self, run: RunBelow) -> set[TransferId]:
        """Return the promotions in flight that include any block of this run."""
        group, part = run.group, run.part
        is_coming = (group.slots[part] != NO_SLOT) & ~group.cached[part]
        coming = group.keys.array[part][is_coming, 0]
        return {
            transfer_id
            for transfer_id, move in self.moves.items()
            if move.upward and not move.late and np.isin(coming, move.keys.array[:, 0]).any()
        }

    def heard(self, names: Collection[TierName]) -> float:
        """Return a time since which each of these tiers has delivered or begun a promotion."""
        return min(self._busy[name].since for name in names)

    def worth_promoting(self, runs: Sequence[RunBelow], num_tokens: int) -> Decision:
        """Decide whether promoting these runs, ``num_tokens`` in all, beats computing them.

        Assumes the speed of the tier that has most of the blocks.
        """
        counts, num_lacking, size = Counter[LowerTier](), 0, self._slot_bytes
        for group, part, _, _ in runs:
            assert group.below is not None
            lacks = group.slots[part] == NO_SLOT
            num_lacking += int(np.count_nonzero(lacks))
            for tier, found in zip(group.below.tiers, group.below.found, strict=True):
                counts[tier] += int(np.count_nonzero(found.readable[part] & lacks))
        ((tier, _),) = counts.most_common(1)
        num_queued = 0
        for move in self.moves.values():
            if move.tier is tier and move.upward and not move.late:
                num_queued += len(move.keys)
        return self._worth.decide(num_tokens, num_lacking * size, num_queued * size, tier.name)

    # -- health and completions -----------------------------------------------------------------

    def note_health(self, health: Health) -> None:
        """Note a tier's health on one rank. Requests stop waiting for an unavailable tier."""
        for tier in self.tiers:
            if tier.name == health.tier:
                if health.opened is not None:
                    self._open(tier, health.rank, health.opened)
                tier.note_health(health.rank, health.reason)
                if tier.ailment:
                    self._transfers.give_up(tier.name, tier.ailment)

    def _open(self, tier: LowerTier, rank: Rank, opened: Opened) -> None:
        """Note that a rank has opened a tier after it failed to at the start."""
        self.reset_number = max(self.reset_number, opened.reset_number)
        if isinstance(tier, SlotTier):
            tier.open(rank, opened)
            if tier.has_remains:
                tier.has_remains = False
                reset = Reset(new_epoch(self.reset_number), self._epoch)
                self._forget((tier.name,), reset)

    def _forget(self, names: tuple[TierName, ...], reset: Reset) -> None:
        for transfer_id in self._transfers.forget(names, reset):
            move = self.moves.pop(transfer_id)
            move.tier.dropped(move.keys)

    def overdue(self, flight: InFlight) -> None:
        """Note that a transfer's deadline has passed: no request may wait for it any more."""
        if isinstance(flight.transfer, Question):
            self.landed(flight)
        elif flight.transfer.id in self.moves:
            move = self.moves[flight.transfer.id]
            move.late = True
            if move.upward:  # or an idle tier would count as busy with it
                self._busy[move.tier.name].give_up()

    def landed(self, flight: InFlight) -> Move | None:
        """Complete a question or a transfer of a lower tier; return the move, if it was one."""
        now = self._clock()
        if isinstance(flight.transfer, Question):
            tier, _ = self._asking.pop(flight.transfer.id)
            tier.answered(Keys(flight.transfer.keys), ~flight.lost, now)
            return None
        move = self.moves.pop(flight.transfer.id, None)
        if move is None:
            return None
        ok, name = ~flight.lost, move.tier.name
        move.tier.moved(move.keys, ok, upward=move.upward, now=now)
        if move.upward and not move.late:
            num_moved = int(np.count_nonzero(ok)) if not flight.overdue else 0
            num_bytes, seconds = self._busy[name].end(num_moved * self._slot_bytes, now)
            self._worth.note_load(num_bytes, seconds, name)
        return move

    def reset(self, reset: Reset) -> None:
        """Forget every block on every tier; the next plan carries the reset to the ranks."""
        self._epoch = reset.epoch
        self._forget(tuple(tier.name for tier in self.tiers), reset)
        for tier in self.tiers:
            tier.reset()


def _source(lookup: TierLookup, known: Flags, start: int, stop: int) -> tuple[int | None, int]:
    """Return the first tier that has the next blocks the host lacks, and where its run ends."""
    here = known[start:stop]
    for number, found in enumerate(lookup.found):
        complete = here | found.readable[start:stop]
        length = len(complete) if complete.all() else int(complete.argmin())
        if not here[:length].all():
            return number, start + length
    return None, start
