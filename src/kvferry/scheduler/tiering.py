"""The tiers below the host: what they have, what moves between them and the host.

::

    device  <-- load --  host  <-- promote ---  lower tiers
            -- store -->       -- writeback -->

A block found only below is first promoted: copied to a host slot, in pieces that can be matched as
they land. Questions and promotions are transfers that requests wait for. Each has a deadline; a
block that has not come by then is not there. A tier that is away on any rank is not used.
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
"""A promotion travels in pieces of this size, so that the first can be used before the last: long
enough for a drive to be fast, and small blocks travel together."""

_PIECE_SLOTS = 32
"""And in so many blocks where their size is not known."""

_PROMOTING_SHARE = 4
"""Promotions under way may claim one slot in so many of the host: they must not flush it."""


@dataclass(frozen=True, eq=False)
class TierLookup:
    """What each usable tier has of some keys, and what any of them has."""

    tiers: Sequence[LowerTier]
    found: Sequence[Presence]
    readable: Flags
    unknown: Flags


@dataclass(eq=False, slots=True)
class GroupLookup:
    """What was found of one group's blocks from number ``first`` on, which have these keys.

    ``slots`` are the host's, also of blocks on their way in; ``cached`` tells which can be read.
    ``below`` is what lower tiers have; None where no longer hit is possible.
    """

    first: int
    keys: Keys
    slots: SlotArray
    cached: Flags
    below: TierLookup | None = None

    def whole(self, flags: Flags, before: bool) -> Flags:
        """Flags of these blocks, and the same one for each block before them."""
        return np.concatenate((np.full(self.first, before), flags))

    def part(self, blocks: range) -> slice:
        """Where these blocks of the group are among those that were looked up."""
        return slice(max(0, blocks.start - self.first), max(0, blocks.stop - self.first))


class RunBelow(NamedTuple):
    """A part of a group's blocks to complete in the host, behind ``parent``.

    Where they are ``chained`` each needs the one before it.
    """

    group: GroupLookup
    part: slice
    parent: Key | None
    chained: bool


class LowerTiers:
    """Finds blocks below the host, brings them up, and learns how transfers there ended.

    Owns the tiers, the moves and questions under way, and the budget of promotions. Its
    ``writeback`` chooses what goes down. Orders go to ``transfers``.
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
        """``worth`` learns the tiers' speeds; ``slot_bytes`` are a block's on one rank, or 0."""
        self._worth = worth
        self.tiers = tuple(tiers)
        self.keyed = tuple([tier for tier in self.tiers if isinstance(tier, KeyedTier)])
        self.pools = {tier.name: tier.pool for tier in self.tiers if tier.pool is not None}
        """Those of the tiers with slots."""
        self._slot_bytes = slot_bytes
        self.piece_slots = max(4, _PIECE_BYTES // slot_bytes) if slot_bytes else _PIECE_SLOTS
        self._busy = {tier.name: BusyTime() for tier in self.tiers}
        self._host = host
        self._transfers = transfers
        self._clock = clock
        self.moves: dict[TransferId, Move] = {}
        """Blocks on their way up or down; what goes down is noted by :class:`Writeback`."""
        self._epoch = 0
        self._asking: dict[TransferId, tuple[LowerTier, list[Keys]]] = {}
        self._most_promoting = max(1, host.num_slots // _PROMOTING_SHARE)
        host.eviction.feeds_below = bool(self.tiers)
        self.reset_number = max([tier.reset_number for tier in self.tiers], default=0)
        """The greatest that a tier is known to have: the next one is greater."""
        remains = tuple(tier.name for tier in self.tiers if tier.has_remains)
        if remains:
            transfers.forget(remains, Reset(new_epoch(self.reset_number), 0))

    # -- what is there --------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> TierLookup:
        """What the usable tiers have of these keys of a request, as far as is known."""
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
        """The tiers that cannot be used now, and why."""
        return tuple(f"{tier.name}: {tier.ailment}" for tier in self.tiers if tier.ailment)

    def has_out_of_reach(self, key: Key) -> bool:
        """Whether a tier that cannot be used now has this block, as far as is known."""
        keys, now = Keys.from_bytes((key,)), self._clock()
        return any(tier.ailment and tier.lookup(keys, now).readable[0] for tier in self.tiers)

    # -- asking ---------------------------------------------------------------------------------

    @property
    def can_be_asked(self) -> bool:
        """Whether there is a tier that finds blocks by their keys."""
        return any(not tier.ailment for tier in self.keyed)

    def ask(self, wanted: Keys) -> set[TransferId]:
        """Ask which of these (distinct) blocks are there; returns the questions to wait for.

        What another request has asked already is not asked again.
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
        """How many more host slots promotions may claim now."""
        room = self._most_promoting
        for move in self.moves.values():
            if move.upward:
                room -= len(move.keys)
        return room

    def promote(self, runs: Sequence[RunBelow], room: int, *, tenant: int = 0) -> set[TransferId]:
        """Bring up those blocks of the runs that the host lacks, into at most ``room`` slots.

        The runs were looked up just now. Returns the transfers to wait for, also those that others
        began. It is empty if the host has no room.
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
        """Add the ``transfers`` that bring up one run; returns the room that is left."""
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
                # A reservation may evict what the lookup has found of later pieces and runs.
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
                    lease.abort()  # the host has evicted some of the run meanwhile
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
                    break  # the host has no room for all of it: what follows could not be reached
            if stop < part.stop:
                parent = keys[stop - 1]
            start = stop
        return room

    def _bringing(self, run: RunBelow) -> set[TransferId]:
        """The promotions under way that bring any of these blocks."""
        group, part = run.group, run.part
        is_coming = (group.slots[part] != NO_SLOT) & ~group.cached[part]
        coming = group.keys.array[part][is_coming, 0]
        return {
            transfer_id
            for transfer_id, move in self.moves.items()
            if move.upward and not move.late and np.isin(coming, move.keys.array[:, 0]).any()
        }

    def heard(self, names: Collection[TierName]) -> float:
        """Each of these tiers has brought something, or begun to, at this time or later."""
        return min(self._busy[name].since for name in names)

    def worth_promoting(self, runs: Sequence[RunBelow], num_tokens: int) -> Decision:
        """Whether these runs, of so many tokens, come up sooner than they are computed.

        The speed is that of the tier which has most of them.
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

    # -- what became of it ----------------------------------------------------------------------

    def note_health(self, health: Health) -> None:
        """A tier went away on one rank, or came back. Requests stop waiting for a tier away."""
        for tier in self.tiers:
            if tier.name == health.tier:
                if health.opened is not None:
                    self._open(tier, health.rank, health.opened)
                tier.note_health(health.rank, health.reason)
                if tier.ailment:
                    self._transfers.give_up(tier.name, tier.ailment)

    def _open(self, tier: LowerTier, rank: Rank, opened: Opened) -> None:
        """A rank has opened a tier that it could not open at the start."""
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
        """A transfer's deadline has passed: no request waits for it, and none may begin to."""
        if isinstance(flight.transfer, Question):
            self.landed(flight)
        elif flight.transfer.id in self.moves:
            move = self.moves[flight.transfer.id]
            move.late = True
            if move.upward:  # else the tier would count as busy while it rests
                self._busy[move.tier.name].give_up()

    def landed(self, flight: InFlight) -> Move | None:
        """A transfer or a question below the host ended; returns what moved, if anything did."""
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
        """Forget every block on every tier; the ranks are told with the next plan."""
        self._epoch = reset.epoch
        self._forget(tuple(tier.name for tier in self.tiers), reset)
        for tier in self.tiers:
            tier.reset()


def _source(lookup: TierLookup, known: Flags, start: int, stop: int) -> tuple[int | None, int]:
    """The first tier that has what the host lacks of a run's next blocks, and how far."""
    here = known[start:stop]
    for number, found in enumerate(lookup.found):
        complete = here | found.readable[start:stop]
        length = len(complete) if complete.all() else int(complete.argmin())
        if not here[:length].all():
            return number, start + length
    return None, start
