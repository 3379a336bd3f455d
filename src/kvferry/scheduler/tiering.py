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

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.leases import Purpose
from kvferry.cache.policies.admission import Watermark
from kvferry.cache.policies.load_or_compute import BusyTime, Decision, LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import Answer, KeyedTier, LowerTier, Runs, WriteMode
from kvferry.scheduler.transfers import End, Flight, Outbox, Wanted, run_numbers
from kvferry.types import HOST, NO_SLOTS, Health, Key, Question, TierName, TransferId

_CLEAN_SHARE = 8
"""With spilling, the coldest slot in so many of the host has a copy below before it is needed."""

_CLEAN_SECONDS = 0.1
"""Where nothing came, went or ended, what was touched or let go since is looked at this often."""

_WHOLE_BLOCKS = 256
_WHOLE_SHARE = 32
"""So many more, and no more than one slot in so many, are spilled with a conversation's end."""

_REST_SECONDS, _MOST_REST_SECONDS = 0.1, 30.0
"""How long nothing is spilled to a tier that could write nothing of the last."""

_MOST_EARLY = 1024
"""So many stores may wait for the block before them; what would be more is left out."""


class Descent:
    """Sends blocks down. Owns when to look for what to spill, and what waits for its parent.

    ``note_sent`` hears of every order. Tiers are those that can be used now.
    """

    def __init__(
        self,
        host: Pool,
        outbox: Outbox,
        clock: Callable[[], float],
        note_sent: Callable[[TransferId, LowerTier, Keys], None],
    ) -> None:
        self._host = host
        self._outbox = outbox
        self._clock = clock
        self._note_sent = note_sent
        self._early: dict[Key, list[Keys]] = {}  # stored before the block they follow, by that
        self._rests: dict[TierName, tuple[float, float]] = {}  # until when, and for how long
        self._watermark = Watermark(
            least=host.num_slots // _CLEAN_SHARE, most=max(1, host.num_slots // 2)
        )
        self._most_more = min(_WHOLE_BLOCKS, host.num_slots // _WHOLE_SHARE)
        self._num_reserved = host.num_reserved
        self._num_changes = 0  # moves that ended, and tiers that went or came back
        self._clean = (-1, -1, -1)  # how things stood when nothing was left to spill
        self._clean_until = 0.0

    def note_change(self) -> None:
        """A move ended, or a tier went or came back: there may be more to spill."""
        self._num_changes += 1

    def wrote(self, tier: TierName, *, ok: bool) -> None:
        """A spill has ended. While all of it fails, the next waits twice as long each time.

        What could not be written is as cold as before: it would be sent again with every step.
        """
        if ok:
            self._rests.pop(tier, None)
            return
        _, seconds = self._rests.get(tier, (0.0, _REST_SECONDS / 2))
        seconds = min(2 * seconds, _MOST_REST_SECONDS)
        self._rests[tier] = (self._clock() + seconds, seconds)

    def rests(self, tier: LowerTier) -> bool:
        """Whether nothing is spilled to it for a while."""
        until, _ = self._rests.get(tier.name, (0.0, 0.0))
        return until > self._clock()

    def reset(self) -> None:
        """Everything is forgotten."""
        self._early.clear()

    # -- as they are stored ---------------------------------------------------------------------

    def stored(
        self, keys: Keys, tiers: Sequence[LowerTier], *, parent: Key | None, chained: bool
    ) -> None:
        """These blocks were just stored in the host, behind ``parent`` if they are a chain.

        What follows a block that no tier has would serve nobody alone. Stores of one chain land in
        any order, so it waits for that block, which may land next.
        """
        now = self._clock()
        through = [tier for tier in tiers if tier.write is WriteMode.THROUGH]
        if not through or not len(keys):
            return
        if parent is not None and not any(tier.may_follow(parent, now) for tier in tiers):
            if len(self._early) < _MOST_EARLY:
                self._early.setdefault(parent, []).append(keys)
            return
        for tier in through:
            going = keys
            if tier.gate is not None and not (lets := tier.gate.lets(keys, now)).all():
                going = keys[: int(lets.argmin())] if chained else keys.take(lets)
            self._send(tier, going, parent=parent, chained=chained)
        if chained and self._early:
            self._stored_before(keys, tiers)

    def _stored_before(self, keys: Keys, tiers: Sequence[LowerTier]) -> None:
        """Send what landed before these, which it follows; then what follows that."""
        firsts = {int(word) for word in keys.array[:, 0]}
        for parent in [key for key in self._early if int.from_bytes(key[:8], "little") in firsts]:
            for early in self._early.pop(parent, ()):  # one sent before may have sent it along
                here = self._host.match(early)  # some may be gone by now, and what follows is vain
                self.stored(early[:here], tiers, parent=parent, chained=True)

    # -- before they go -------------------------------------------------------------------------

    def spill(self, tiers: Sequence[LowerTier]) -> None:
        """Once a step: copy down what the host would evict next, ahead of need.

        A burst that outruns the watermark evicts blocks that have no copy below yet.
        """
        self._watermark.demand(self._host.num_reserved - self._num_reserved)
        self._num_reserved = self._host.num_reserved
        wanted = max(self._watermark.depth - self._host.num_free, self._host.num_near_ceiling)
        # To look through the coldest takes as long as a step's other work, and mostly in vain.
        now = self._clock()
        standing = (self._num_reserved, self._host.generation, self._num_changes)
        if wanted <= 0 or (standing == self._clean and now < self._clean_until):
            return
        has_sent = False
        for tier in tiers:
            if tier.write is WriteMode.SPILL and not self.rests(tier):
                has_sent |= self._spill_to(tier, wanted)
        if not has_sent:
            self._clean, self._clean_until = standing, now + _CLEAN_SECONDS

    def _spill_to(self, tier: LowerTier, wanted: int) -> bool:
        coldest = self._host.coldest(wanted + self._most_more)
        lacks = ~tier.known(coldest, self._clock())
        missing = coldest.take(lacks)
        num_asked = int(np.count_nonzero(lacks[:wanted]))
        if not num_asked:
            return False
        # No chain: ends come before beginnings here, as they should go later on.
        missing = missing[::-1]
        if tier.gate is not None:
            lets = tier.gate.lets(missing, self._clock())
            num_asked = int(np.count_nonzero(lets[-num_asked:]))
            missing = missing.take(lets)
            if not num_asked:
                return False
        starts, before = self._host.runs_of(missing)
        # But the whole of what was begun: its rest is as cold, and should lie beside it.
        first = int(np.searchsorted(starts, len(missing) - num_asked, side="right")) - 1
        cut = starts.item(first)
        runs = (starts[first:] - cut, before[first:])
        return self._send(tier, missing[cut:], parent=None, chained=False, runs=runs)

    def send_runs(self, tier: LowerTier, keys: Keys) -> bool:
        """Copy blocks that the host has and the tier lacks, runs of conversations among them."""
        return self._send(tier, keys, parent=None, chained=False, runs=self._host.runs_of(keys))

    def _send(
        self,
        tier: LowerTier,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        runs: Runs | None = None,
    ) -> bool:
        """Copy those of the host's blocks to a tier that it lacks and has room for."""
        owners = self._host.tenants_of(keys)
        if owners is None or not len(keys):
            return self._send_one(tier, keys, parent, chained, runs, 0)
        tenant = int(owners[0])  # what was stored together, as a chain, is one tenant's
        if chained or not np.count_nonzero(owners != tenant):
            return self._send_one(tier, keys, parent, chained, runs, tenant)
        has_sent = False
        for tenant in np.unique(owners).tolist():
            part = keys.take(owners == tenant)
            its_runs = self._host.runs_of(part) if runs is not None else None
            has_sent |= self._send_one(tier, part, None, False, its_runs, tenant)
        return has_sent

    def _send_one(
        self,
        tier: LowerTier,
        keys: Keys,
        parent: Key | None,
        chained: bool,
        runs: Runs | None,
        tenant: int,
    ) -> bool:
        now = self._clock()
        room = tier.reserve(
            keys, parent=parent, chained=chained, now=now, runs=runs, tenant=max(0, tenant)
        )
        if room is None:
            return False
        going = keys.take(room.positions)
        if tier.gate is not None:
            tier.gate.wrote(len(going))
        reading = self._host.pin(going, Purpose.COPY)
        assert reading is not None
        following = None
        before: tuple[Key | None, ...] = ()
        if tier.joints is not None and (chained or runs is not None):
            starts, before = self._host.runs_of(going)
            following = tier.joints.cut(going, starts, before)
        elif tier.pool is None and (chained or runs is not None):
            # Some of a chain may have been here before it was stored: these do not all follow.
            starts, _ = runs if runs is not None else self._host.runs_of(keys)
            starts = np.searchsorted(room.positions, starts)
            following = run_numbers(room.positions, starts[starts < len(going)])
        transfer_id = self._outbox.move(End.of(HOST, reading), room.end, going, following)
        self._note_sent(transfer_id, tier, going)
        for key in before:
            if key is not None:
                self._send_end(tier, key)
        return True

    def _send_end(self, tier: LowerTier, key: Key) -> None:
        """A chain goes on from a block of the host's: see that an object ends there.

        What is not there yet goes there in its own time where blocks are spilled. Where they are
        written through, it came up from there, and how long ago nobody remembers.
        """
        joints, now = tier.joints, self._clock()
        if joints is None or joints.ends(key):
            return
        if tier.write is WriteMode.SPILL and not tier.known(Keys.from_bytes((key,)), now)[0]:
            return
        line = self._host.line(key, tier.most_in_one)
        ends = [at for at, each in enumerate(line) if joints.ends(each)]
        line = line[ends[-1] + 1 :] if ends else line
        reading = self._host.pin(line, Purpose.COPY)
        if reading is None or len(reading) < len(line):
            if reading is not None:
                reading.release()
            return
        if tier.gate is not None:
            tier.gate.wrote(len(line))
        tier.reserve(line, parent=None, chained=True, now=now)  # from now on it is known
        runs = joints.cut(line, NO_SLOTS, ())
        transfer_id = self._outbox.move(End.of(HOST, reading), tier.read(line), line, runs)
        self._note_sent(transfer_id, tier, line)


# ------------------------------------------------------------------------------------------------
# What only the host holds, sent to what outlives us while nothing else is to do.
#
# With spilling a block goes down before the host drops it, so what was used last would be lost with
# the process. Sent here it only goes sooner: a block that is below is not written again.

log = logging.getLogger(__name__)

_SAY_AFTER, _SAY_EVERY = 2.0, 5.0
_LOOK_RESTS = 20
"""Times as long as a look took pass before the next. A look at 100,000 blocks takes 13 ms, which a
request that comes just then waits for. (2 vCPU, Python 3.11, 2026-11-16.)"""

_GOING_SHARE = 8
"""Blocks of the host that may be on their way at a time, one in so many: they cannot be evicted."""


class WriteOut:
    """Owns what the tier lacked of the host at the last look, and until when it may be sent.

    The tier is the first of ``names`` with places. ``seconds`` bounds the time from a look until
    no more is sent; 0: nothing is. Whoever calls :meth:`advance` has nothing to do: it looks
    through the whole host when something has come.
    """

    def __init__(
        self,
        host: Pool,
        lower: LowerTiers,
        clock: Callable[[], float],
        *,
        names: Collection[TierName],
        seconds: float,
        most_going: int,
    ) -> None:
        self._host = host
        self._lower = lower
        self._clock = clock
        self._names = names
        can_be = any(each.name in names and each.write is WriteMode.SPILL for each in lower.tiers)
        self._seconds = seconds if can_be else 0.0
        self._most_going = max(1, min(most_going, host.num_slots // _GOING_SHARE))
        self._left = Keys.empty()
        self._seen = host.generation
        self._began = self._say_at = self._look_at = 0.0
        self._num_found = 0

    @property
    def is_due(self) -> bool:
        """Whether there may be something to send: the engine should go on, or close later."""
        return bool(self._seconds) and (len(self._left) > 0 or self._host.generation != self._seen)

    @property
    def is_under_way(self) -> bool:
        """Whether there may be something to send, now or once it is stored, or something goes down.

        What comes up is no matter: whoever closes would wait for a read that hangs.
        """
        return self.is_due or self._lower.is_keeping

    @property
    def can_be(self) -> bool:
        """Whether there is a tier that is spilled to and can be used, and time for this."""
        return bool(self._seconds) and self._tier() is not None

    def advance(self) -> None:
        """Send some of what is left, with the next plan; nothing while much is on its way."""
        tier = self._tier()
        if tier is None or not self.is_due:
            self._left, self._seen = Keys.empty(), self._host.generation
            return
        now = self._clock()
        if self._host.generation != self._seen and now >= self._look_at:
            self._look(tier, now)
        elif not len(self._left):
            return
        elif now >= self._began + self._seconds or not self._lower.can_spill_to(tier):
            log.info("%d blocks that only host memory holds are left as they are", len(self._left))
            self._left = Keys.empty()
            return
        self._say(tier.name, now)
        going = self._most_going - self._lower.num_going(tier)
        if going > 0:
            # A run's end comes before its beginning here, and is to be evicted before it there.
            piece, self._left = self._left[:going][::-1], self._left[going:]
            self._send(tier, piece)

    def stop(self) -> None:
        """Nothing is to be sent any more: after a reset no other life asks for these blocks."""
        self._seconds = 0.0
        self._left = Keys.empty()

    def _tier(self) -> LowerTier | None:
        for tier in self._lower.usable:
            if tier.name in self._names and tier.pool is not None:
                return tier if tier.write is WriteMode.SPILL else None
        return None

    def _look(self, tier: LowerTier, now: float) -> None:
        host = self._host
        self._seen = host.generation
        found = host.coldest(host.num_slots)
        self._left = found.take(~tier.known(found, now))
        self._num_found = len(self._left)
        self._began, self._say_at = now, now + _SAY_AFTER
        done = self._clock()
        self._look_at = done + _LOOK_RESTS * (done - now)

    def _send(self, tier: LowerTier, piece: Keys) -> None:
        """Those of them that are still here, still lacking below, and let through."""
        now = self._clock()
        wanted = self._host.cached(piece) & ~tier.known(piece, now)
        if tier.gate is not None:
            wanted[wanted] = tier.gate.lets(piece.take(wanted), now)
        if np.count_nonzero(wanted):
            self._lower.send_out(tier, piece.take(wanted))

    def _say(self, name: TierName, now: float) -> None:
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            done = self._num_found - len(self._left)
            log.info(
                "writing to %s what only host memory holds: %d of %d blocks, %.0f of %.0f s",
                name,
                done,
                self._num_found,
                now - self._began,
                self._seconds,
            )


# ------------------------------------------------------------------------------------------------
# More than one tier below the device: tiers under the host, fed from it and read through it.
#
# ::
#
#     device  <-- load --  host  <-- promote --  lower
#             -- store -->       ---- spill --->
#
# A block found only below is first promoted: copied to a host slot like any block that arrives, in
# pieces that become matchable as they land. Blocks go down either when they are stored
# (write-through) or when the host is about to evict them (spill); a block that is already below is
# not copied again, and evicting it from the host costs nothing.
#
# What a tier has is known (its places are ours) or must be asked (it finds blocks by their keys).
# Questions and promotions are transfers in flight that requests wait for: each has a deadline, and
# what has not come by then is not there. A tier that is away on any rank is as if it were not.

_PIECE_BYTES = 16 << 20
"""A promotion travels in pieces of this size, so that the first can be used before the last: long
enough for a drive to be fast, and small blocks travel together."""

_PIECE_SLOTS = 32
"""And in so many blocks where nobody says how large they are."""

_OUT_PIECES = 16
"""So many pieces of that size are written out at a time while nothing else is to do."""

_PROMOTING_SHARE = 4
"""Promotions under way may claim one slot in so many of the host: they must not flush it."""


@dataclass(eq=False)
class _Move:
    """Blocks on their way up or down. One that is ``late`` keeps its slots; nobody waits for it."""

    tier: LowerTier
    keys: Keys
    upward: bool
    late: bool = False


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
    what goes down is its descent's to choose. Orders go to the outbox like all others.
    """

    def __init__(
        self,
        host: Pool,
        tiers: Sequence[LowerTier],
        outbox: Outbox,
        clock: Callable[[], float],
        *,
        slot_bytes: int = 0,
        lasting: Collection[TierName] = (),
        write_out: float = 0.0,
    ) -> None:
        """``slot_bytes`` is the size of a block, as one rank has it; 0 where it is not known.

        ``lasting`` are those that outlive us: for ``write_out`` seconds what only the host holds is
        sent there at rest.
        """
        self.tiers = tuple(tiers)
        self._slot_bytes = slot_bytes
        self._piece_slots = max(4, _PIECE_BYTES // slot_bytes) if slot_bytes else _PIECE_SLOTS
        self._busy = {tier.name: BusyTime() for tier in self.tiers}
        self._host = host
        self._outbox = outbox
        self._clock = clock
        self._moves: dict[TransferId, _Move] = {}
        self._asking: dict[TransferId, tuple[LowerTier, list[Keys]]] = {}
        self._most_promoting = max(1, host.num_slots // _PROMOTING_SHARE)
        host.feeds_below = bool(self.tiers)
        remains = tuple(tier.name for tier in self.tiers if tier.has_remains)
        if remains:
            outbox.forget(remains)
        self._descent = Descent(host, outbox, clock, self._note_sent)
        self.write_out = WriteOut(
            host,
            self,
            clock,
            names=lasting,
            seconds=write_out,
            most_going=_OUT_PIECES * self._piece_slots,
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
        self._moves[transfer_id] = _Move(tier, coming, upward=True)
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

    # -- down ---------------------------------------------------------------------------------

    def write_through(self, keys: Keys, *, parent: Key | None, chained: bool) -> None:
        """These blocks were just stored in the host, behind ``parent`` if they are a chain."""
        self._descent.stored(keys, self.usable, parent=parent, chained=chained)

    def spill(self) -> None:
        """Once a step: copy down what the host would evict next, ahead of need."""
        if self.tiers:
            self._descent.spill(self.usable)

    def can_spill_to(self, tier: LowerTier) -> bool:
        """Whether it took some of what was last spilled to it, or has had its rest since."""
        return not self._descent.rests(tier)

    def num_going(self, tier: LowerTier) -> int:
        """Blocks on their way down to it."""
        return sum(
            len(move.keys) for move in self._moves.values() if move.tier is tier and not move.upward
        )

    @property
    def is_keeping(self) -> bool:
        """Whether blocks are on their way into the host or down from it, and not late."""
        is_going = any(not (move.upward or move.late) for move in self._moves.values())
        return is_going or self._outbox.is_storing

    def send_out(self, tier: LowerTier, keys: Keys) -> None:
        """Copy these blocks of the host, which it lacks, to a tier."""
        self._descent.send_runs(tier, keys)

    def _note_sent(self, transfer_id: TransferId, tier: LowerTier, keys: Keys) -> None:
        self._moves[transfer_id] = _Move(tier, keys, upward=False)

    # -- what became of it --------------------------------------------------------------------

    def note_health(self, health: Health) -> None:
        """A tier went away on one rank, or came back. Nobody waits for one that is away."""
        self._descent.note_change()
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
        self._descent.note_change()
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
                self._descent.wrote(move.tier.name, ok=not flight.lost.all())
        return None

    def reset(self) -> None:
        """Forget every block on every tier; the ranks are told with the next plan."""
        for transfer_id in self._outbox.forget(tuple(tier.name for tier in self.tiers)):
            move = self._moves.pop(transfer_id)
            move.tier.dropped(move.keys)
        self._descent.reset()
        self.write_out.stop()
        for tier in self.tiers:
            tier.reset()

    def check_integrity(self) -> None:
        for tier in self.tiers:
            tier.check_integrity()
