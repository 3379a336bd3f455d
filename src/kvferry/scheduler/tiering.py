"""More than one tier below the device: tiers under the host, fed from it and read through it.

::

    device  <-- load --  host  <-- promote --  lower
            -- store -->       ---- spill --->

A block found only below is first promoted: copied to a host slot like any block that arrives, in
pieces that become matchable as they land. Blocks go down either when they are stored
(write-through) or when the host is about to evict them (spill); a block that is already below is
not copied again, and evicting it from the host costs nothing.

What a tier has is known (its places are ours) or must be asked (it finds blocks by their keys).
Questions and promotions are transfers in flight that requests wait for: each has a deadline, and
what has not come by then is not there. A tier that is away on any rank is as if it were not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.load_or_compute import BusyTime, Decision, LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import Answer, KeyedTier, LowerTier
from kvferry.scheduler.transfers import End, Flight, Outbox, Wanted
from kvferry.scheduler.writeback import Move, Writeback
from kvferry.types import HOST, Health, Key, Question, TierName, TransferId

_PIECE_BYTES = 16 << 20
"""A promotion travels in pieces of this size, so that the first can be used before the last: long
enough for a drive to be fast, and small blocks travel together."""

_PIECE_SLOTS = 32
"""And in so many blocks where nobody says how large they are."""

_FLUSH_PIECES = 16
"""A flush has so many pieces of that size in flight."""

_PROMOTING_SHARE = 4
"""Promotions under way may claim one slot in so many of the host: they must not flush it."""


class Coming(NamedTuple):
    """Blocks on their way up, piece by piece, and the tiers that they come from.

    All of those have brought something, or begun to, at ``heard`` or later.
    """

    pieces: tuple[Keys, ...]
    tiers: frozenset[TierName]
    heard: float

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.pieces))

    def brings(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether its block is one of these."""
        words = np.concatenate([piece.array[:, 0] for piece in self.pieces])
        return np.isin(keys.array[:, 0], words)


class LowerTiers:
    """What is below the host: finds blocks there, brings them up, sends them down.

    Owns the tiers, what moves between them and the host, what was asked, and the promotion budget;
    what goes down is for its ``writeback`` to choose. Orders go to the outbox like all others.
    """

    def __init__(
        self,
        host: Pool,
        tiers: Sequence[LowerTier],
        outbox: Outbox,
        clock: Callable[[], float],
        *,
        slot_bytes: int = 0,
        flush_tiers: Collection[TierName] = (),
        flush_seconds: float = 0.0,
    ) -> None:
        """``slot_bytes`` is the size of a block, as one rank has it; 0 where it is not known.

        ``flush_tiers`` outlive the process: see :class:`Writeback`, also for ``flush_seconds``.
        """
        self.tiers = tuple(tiers)
        self._slot_bytes = slot_bytes
        self._piece_slots = max(4, _PIECE_BYTES // slot_bytes) if slot_bytes else _PIECE_SLOTS
        self._busy = {tier.name: BusyTime() for tier in self.tiers}
        self._host = host
        self._outbox = outbox
        self._clock = clock
        self._moves: dict[TransferId, Move] = {}
        self._asking: dict[TransferId, tuple[LowerTier, list[Keys]]] = {}
        self._most_promoting = max(1, host.num_slots // _PROMOTING_SHARE)
        host.feeds_below = bool(self.tiers)
        remains = tuple(tier.name for tier in self.tiers if tier.has_remains)
        if remains:
            outbox.forget(remains)
        self.writeback = Writeback(
            host,
            self.tiers,
            outbox,
            clock,
            self._moves,
            flush_tiers=flush_tiers,
            flush_seconds=flush_seconds,
            most_flushing=_FLUSH_PIECES * self._piece_slots,
        )

    def __bool__(self) -> bool:
        return bool(self.tiers)

    @property
    def usable(self) -> list[LowerTier]:
        """The tiers that can be used now."""
        return [tier for tier in self.tiers if not tier.ailment]

    # -- what is there ------------------------------------------------------------------------

    def cached(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether any lower tier can be read for it, as far as is known."""
        found = np.zeros(len(keys), dtype=bool)
        now = self._clock()
        for tier in self.usable:
            found |= tier.there(keys, now)
        return found

    def unknown(self, keys: Keys, chained: bool) -> npt.NDArray[np.bool_]:
        """For each key of a request, whether some tier would have to be asked for it."""
        unknown = np.zeros(len(keys), dtype=bool)
        now = self._clock()
        runs = np.zeros(len(keys), dtype=np.int64) if chained else None
        for tier in self.usable:
            unknown |= tier.unknown(keys, now, runs)
        return unknown

    @property
    def away(self) -> tuple[str, ...]:
        """The tiers that cannot be used now, and why."""
        return tuple(f"{tier.name}: {tier.ailment}" for tier in self.tiers if tier.ailment)

    def has_out_of_reach(self, key: Key) -> bool:
        """Whether a tier that cannot be used now has this block, as far as is known."""
        keys, now = Keys.from_bytes((key,)), self._clock()
        return any(tier.ailment and tier.there(keys, now)[0] for tier in self.tiers)

    @property
    def counts_asked(self) -> bool:
        """Whether it matters to a tier how often a block is asked for."""
        return any(tier.gate is not None for tier in self.tiers)

    def asked(self, keys: Keys) -> None:
        """A request asked for these blocks."""
        for tier in self.tiers:
            if tier.gate is not None:
                tier.gate.see(keys)

    @property
    def can_be_asked(self) -> bool:
        """Whether there is a tier that finds blocks by their keys."""
        return any(isinstance(tier, KeyedTier) and not tier.ailment for tier in self.tiers)

    @property
    def most_in_one(self) -> int:
        """How many blocks of a chain may lie in one object of any tier."""
        return max((tier.most_in_one for tier in self.usable), default=1)

    def ask(self, wanted: Wanted) -> set[TransferId]:
        """Ask which of these (distinct) blocks are there; returns the questions to wait for.

        What another request has asked already is not asked again, where its answer is as good.
        """
        questions = set()
        now = self._clock()
        for tier in self.usable:
            most = tier.most_in_one
            rest = wanted.lacking(~tier.unknown(wanted.keys, now, wanted.runs), most)
            for question_id, (asked, pieces) in self._asking.items():
                for piece in pieces if asked is tier else ():
                    num_needed = rest.num_needed
                    rest = rest.lacking(rest.answered_by(piece, most), most)
                    if rest.num_needed < num_needed:
                        questions.add(question_id)
            if rest.num_needed:
                question_id = self._outbox.ask(tier.name, rest.keys, rest.at)
                self._asking.setdefault(question_id, (tier, []))[1].append(rest.keys)
                questions.add(question_id)
        return questions

    # -- up -----------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more host slots promotions may claim now."""
        return self._most_promoting - sum(
            len(move.keys) for move in self._moves.values() if move.upward
        )

    def promote(
        self, keys: Keys, *, parent: Key | None, chained: bool, tenant: int = 0
    ) -> set[TransferId]:
        """Bring up those of a run of blocks that the host lacks, as far as the budget goes.

        ``parent`` is the key before the run. Returns the transfers to wait for, also those that
        others began: none if the budget is spent or the host has no room.
        """
        transfers = self._bringing(keys)
        start = 0
        while start < len(keys):
            ahead = keys[start : start + min(self.room, self._piece_slots)]
            if len(ahead) and self._host.known(ahead).all():
                parent = ahead[len(ahead) - 1]
                start += len(ahead)
                continue
            piece = self._liftable(ahead)
            transfer_id = self._lift(*piece, parent, chained, tenant) if piece is not None else None
            if piece is None or transfer_id is None:
                break
            transfers.add(transfer_id)
            if not self._host.known(piece[1]).all():
                break  # the host had no room for all of it: what follows would not be reached
            parent = piece[1][len(piece[1]) - 1]
            start += len(piece[1])
        return transfers

    def _bringing(self, keys: Keys) -> set[TransferId]:
        """The promotions under way that bring any of these blocks."""
        if not self._moves:
            return set()
        coming = keys.take(self._host.known(keys) & ~self._host.cached(keys)).array[:, 0]
        return {
            transfer_id
            for transfer_id, move in self._moves.items()
            if move.upward and not move.late and np.isin(coming, move.keys.array[:, 0]).any()
        }

    def coming(self, transfer_ids: Collection[TransferId]) -> Coming | None:
        """What these promotions bring; None if there are none, or others than promotions."""
        moves = [self._moves.get(transfer_id) for transfer_id in transfer_ids]
        found = [move for move in moves if move is not None and move.upward]
        if not found or len(found) < len(moves):
            return None
        names = frozenset(move.tier.name for move in found)
        heard = min(self._busy[name].since for name in names)
        return Coming(tuple(move.keys for move in found), names, heard)

    def _liftable(self, keys: Keys) -> tuple[LowerTier, Keys] | None:
        """The longest start of a run that one tier can complete, and that tier."""
        known = self._host.known(keys)
        now = self._clock()
        for tier in self.usable:
            complete = known | tier.there(keys, now)
            length = len(keys) if complete.all() else int(complete.argmin())
            if not known[:length].all():
                return tier, keys[:length]
        return None

    def _lift(
        self, tier: LowerTier, keys: Keys, parent: Key | None, chained: bool, tenant: int
    ) -> TransferId | None:
        writing = self._host.reserve(keys, parent=parent, chained=chained, tenant=tenant)
        if writing is None:
            return None
        coming = keys.take(writing.positions)
        transfer_id = self._outbox.move(tier.read(coming), End.of(HOST, writing), coming)
        self._moves[transfer_id] = Move(tier, coming, upward=True)
        self._busy[tier.name].begin(self._clock())
        return transfer_id

    def worth_bringing(
        self, keys: Sequence[Keys], num_tokens: int, worth: LoadOrCompute
    ) -> Decision:
        """Whether these blocks, of so many tokens, come up sooner than they are computed.

        By the speed of the tier that has most of them.
        """
        now = self._clock()
        lacking = [each.take(~self._host.known(each)) for each in keys]
        found = {
            tier: sum(int(np.count_nonzero(tier.there(each, now))) for each in lacking)
            for tier in self.usable
        }
        tier = max(found, key=lambda tier: found[tier])
        moves = (m for m in self._moves.values() if m.upward and not m.late and m.tier is tier)
        queued = sum(len(move.keys) for move in moves)
        num_bytes = sum(map(len, lacking)) * self._slot_bytes
        return worth.decide(num_tokens, num_bytes, queued * self._slot_bytes, tier.name)

    # -- what became of it --------------------------------------------------------------------

    def note_health(self, health: Health) -> None:
        """A tier went away on one rank, or came back. Nobody waits for one that is away."""
        self.writeback.note_change()
        for tier in self.tiers:
            if tier.name == health.tier:
                tier.heard(health.rank, health.reason)
                if tier.ailment:
                    self._outbox.give_up(tier.name, tier.ailment)

    def overdue(self, flight: Flight) -> None:
        """A transfer's time is up: its deadline has ended all waiting, so nobody may begin to."""
        if isinstance(flight.transfer, Question):
            self.landed(flight)
        elif flight.transfer.id in self._moves:
            move = self._moves[flight.transfer.id]
            move.late = True
            if move.upward:  # else the tier would count as busy while it rests
                self._busy[move.tier.name].give_up()

    def landed(self, flight: Flight) -> tuple[TierName, int, float] | None:
        """A transfer or a question below the host ended.

        Returns what a tier has brought up, in bytes of one rank, in which time, if it has.
        """
        self.writeback.note_change()
        now = self._clock()
        if isinstance(flight.transfer, Question):
            tier, _ = self._asking.pop(flight.transfer.id)
            told, runs = Keys(flight.transfer.keys), flight.transfer.runs
            tier.answered(Answer(told, ~flight.lost, not flight.overdue, runs), now)
            return None
        move = self._moves.pop(flight.transfer.id, None)
        if move is not None:
            move.tier.moved(move.keys, ~flight.lost, upward=move.upward, now=now)
            if move.upward and not move.late:
                num_moved = int(np.count_nonzero(~flight.lost)) if not flight.overdue else 0
                took = self._busy[move.tier.name].end(num_moved * self._slot_bytes, now)
                return move.tier.name, *took
            if not move.upward:
                self.writeback.wrote(move.tier.name, ok=not flight.lost.all())
        return None

    def reset(self) -> None:
        """Forget every block on every tier; the ranks are told with the next plan."""
        for transfer_id in self._outbox.forget(tuple(tier.name for tier in self.tiers)):
            move = self._moves.pop(transfer_id)
            move.tier.dropped(move.keys)
        self.writeback.reset()
        for tier in self.tiers:
            tier.reset()

    def check_integrity(self) -> None:
        for tier in self.tiers:
            tier.check_integrity()
