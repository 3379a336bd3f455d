"""Which of the host's blocks go down to levels, and when: as they are stored, or before they go.

::

    stored ──> a level that is written through: at once, or when the block before it is on its way
    coldest ─> a level that is spilled to: ahead of need, ends before beginnings
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.keys import Keys
from kvferry.lease import Purpose
from kvferry.policy import Watermark
from kvferry.pool import Pool
from kvferry.scheduler.following import run_numbers
from kvferry.scheduler.level import Level, WriteMode
from kvferry.scheduler.outbox import End, Outbox
from kvferry.scheduler.side_by_side import Runs
from kvferry.types import HOST, NO_SLOTS, Key, TierName, TransferId

_CLEAN_SHARE = 8
"""With spilling, the coldest slot in so many of the host has a copy below before it is needed."""

_CLEAN_SECONDS = 0.1
"""Where nothing came, went or ended, what was touched or let go since is looked at this often."""

_WHOLE_BLOCKS = 256
_WHOLE_SHARE = 32
"""So many more, and no more than one slot in so many, are spilled with a conversation's end."""

_REST_SECONDS, _MOST_REST_SECONDS = 0.1, 30.0
"""How long nothing is spilled to a level that could write nothing of the last."""

_MOST_EARLY = 1024
"""So many stores may wait for the block before them; what would be more is left out."""


class Descent:
    """Sends blocks down. Owns when to look for what to spill, and what waits for its parent.

    ``note_sent`` hears of every order. Levels are those that can be used now.
    """

    def __init__(
        self,
        host: Pool,
        outbox: Outbox,
        clock: Callable[[], float],
        note_sent: Callable[[TransferId, Level, Keys], None],
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
        self._num_changes = 0  # moves that ended, and levels that went or came back
        self._clean = (-1, -1, -1)  # how things stood when nothing was left to spill
        self._clean_until = 0.0

    def note_change(self) -> None:
        """A move ended, or a level went or came back: there may be more to spill."""
        self._num_changes += 1

    def wrote(self, level: TierName, *, ok: bool) -> None:
        """A spill has ended. While all of it fails, the next waits twice as long each time.

        What could not be written is as cold as before: it would be sent again with every step.
        """
        if ok:
            self._rests.pop(level, None)
            return
        _, seconds = self._rests.get(level, (0.0, _REST_SECONDS / 2))
        seconds = min(2 * seconds, _MOST_REST_SECONDS)
        self._rests[level] = (self._clock() + seconds, seconds)

    def rests(self, level: Level) -> bool:
        """Whether nothing is spilled to it for a while."""
        until, _ = self._rests.get(level.name, (0.0, 0.0))
        return until > self._clock()

    def reset(self) -> None:
        """Everything is forgotten."""
        self._early.clear()

    # -- as they are stored ---------------------------------------------------------------------

    def stored(
        self, keys: Keys, levels: Sequence[Level], *, parent: Key | None, chained: bool
    ) -> None:
        """These blocks were just stored in the host, behind ``parent`` if they are a chain.

        What follows a block that no level has would serve nobody alone. Stores of one chain land in
        any order, so it waits for that block, which may land next.
        """
        now = self._clock()
        through = [level for level in levels if level.write is WriteMode.THROUGH]
        if not through or not len(keys):
            return
        if parent is not None and not any(level.may_follow(parent, now) for level in levels):
            if len(self._early) < _MOST_EARLY:
                self._early.setdefault(parent, []).append(keys)
            return
        for level in through:
            going = keys
            if level.gate is not None and not (lets := level.gate.lets(keys, now)).all():
                going = keys[: int(lets.argmin())] if chained else keys.take(lets)
            self._send(level, going, parent=parent, chained=chained)
        if chained and self._early:
            self._stored_before(keys, levels)

    def _stored_before(self, keys: Keys, levels: Sequence[Level]) -> None:
        """Send what landed before these, which it follows; then what follows that."""
        firsts = {int(word) for word in keys.array[:, 0]}
        for parent in [key for key in self._early if int.from_bytes(key[:8], "little") in firsts]:
            for early in self._early.pop(parent, ()):  # one sent before may have sent it along
                here = self._host.match(early)  # some may be gone by now, and what follows is vain
                self.stored(early[:here], levels, parent=parent, chained=True)

    # -- before they go -------------------------------------------------------------------------

    def spill(self, levels: Sequence[Level]) -> None:
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
        for level in levels:
            if level.write is WriteMode.SPILL and not self.rests(level):
                has_sent |= self._spill_to(level, wanted)
        if not has_sent:
            self._clean, self._clean_until = standing, now + _CLEAN_SECONDS

    def _spill_to(self, level: Level, wanted: int) -> bool:
        coldest = self._host.coldest(wanted + self._most_more)
        lacks = ~level.known(coldest, self._clock())
        missing = coldest.take(lacks)
        num_asked = int(np.count_nonzero(lacks[:wanted]))
        if not num_asked:
            return False
        # No chain: ends come before beginnings here, as they should go later on.
        missing = missing[::-1]
        if level.gate is not None:
            lets = level.gate.lets(missing, self._clock())
            num_asked = int(np.count_nonzero(lets[-num_asked:]))
            missing = missing.take(lets)
            if not num_asked:
                return False
        starts, before = self._host.runs_of(missing)
        # But the whole of what was begun: its rest is as cold, and should lie beside it.
        first = int(np.searchsorted(starts, len(missing) - num_asked, side="right")) - 1
        cut = starts.item(first)
        runs = (starts[first:] - cut, before[first:])
        return self._send(level, missing[cut:], parent=None, chained=False, runs=runs)

    def send_runs(self, level: Level, keys: Keys) -> bool:
        """Copy blocks that the host has and the level lacks, runs of conversations among them."""
        return self._send(level, keys, parent=None, chained=False, runs=self._host.runs_of(keys))

    def _send(
        self,
        level: Level,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        runs: Runs | None = None,
    ) -> bool:
        """Copy those of the host's blocks to a level that it lacks and has room for."""
        owners = self._host.tenants_of(keys)
        if owners is None or not len(keys):
            return self._send_one(level, keys, parent, chained, runs, 0)
        tenant = int(owners[0])  # what was stored together, as a chain, is one tenant's
        if chained or not np.count_nonzero(owners != tenant):
            return self._send_one(level, keys, parent, chained, runs, tenant)
        has_sent = False
        for tenant in np.unique(owners).tolist():
            part = keys.take(owners == tenant)
            its_runs = self._host.runs_of(part) if runs is not None else None
            has_sent |= self._send_one(level, part, None, False, its_runs, tenant)
        return has_sent

    def _send_one(
        self,
        level: Level,
        keys: Keys,
        parent: Key | None,
        chained: bool,
        runs: Runs | None,
        tenant: int,
    ) -> bool:
        now = self._clock()
        room = level.reserve(
            keys, parent=parent, chained=chained, now=now, runs=runs, tenant=max(0, tenant)
        )
        if room is None:
            return False
        going = keys.take(room.positions)
        if level.gate is not None:
            level.gate.wrote(len(going))
        reading = self._host.pin(going, Purpose.COPY)
        assert reading is not None
        following = None
        before: tuple[Key | None, ...] = ()
        if level.joints is not None and (chained or runs is not None):
            starts, before = self._host.runs_of(going)
            following = level.joints.cut(going, starts, before)
        elif level.pool is None and (chained or runs is not None):
            # Some of a chain may have been here before it was stored: these do not all follow.
            starts, _ = runs if runs is not None else self._host.runs_of(keys)
            starts = np.searchsorted(room.positions, starts)
            following = run_numbers(room.positions, starts[starts < len(going)])
        transfer_id = self._outbox.move(End.of(HOST, reading), room.end, going, following)
        self._note_sent(transfer_id, level, going)
        for key in before:
            if key is not None:
                self._send_end(level, key)
        return True

    def _send_end(self, level: Level, key: Key) -> None:
        """A chain goes on from a block of the host's: see that an object ends there.

        What is not there yet goes there in its own time where blocks are spilled. Where they are
        written through, it came up from there, and how long ago nobody remembers.
        """
        joints, now = level.joints, self._clock()
        if joints is None or joints.ends(key):
            return
        if level.write is WriteMode.SPILL and not level.known(Keys.from_bytes((key,)), now)[0]:
            return
        line = self._host.line(key, level.most_in_one)
        ends = [at for at, each in enumerate(line) if joints.ends(each)]
        line = line[ends[-1] + 1 :] if ends else line
        reading = self._host.pin(line, Purpose.COPY)
        if reading is None or len(reading) < len(line):
            if reading is not None:
                reading.release()
            return
        if level.gate is not None:
            level.gate.wrote(len(line))
        level.reserve(line, parent=None, chained=True, now=now)  # from now on it is known
        runs = joints.cut(line, NO_SLOTS, ())
        transfer_id = self._outbox.move(End.of(HOST, reading), level.read(line), line, runs)
        self._note_sent(transfer_id, level, line)
