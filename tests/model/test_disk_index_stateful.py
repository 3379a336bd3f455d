"""An index against its model: any order of notes, commits, faults, crashes and openings."""

from __future__ import annotations

import errno
import random

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.fakes.crafted_keys import keys
from tests.fakes.sim_disk import SimDisk, images
from tests.model.index_oracle import Event, Forgot, History, Lost, Wrote, content_of

from kvferry.cache.slots import as_slots
from kvferry.errors import StoreError
from kvferry.tiers.disk.index import Shape

STORE_ID = b"s" * 16
PROOF_BYTES = 8
MOST_PLACES = 40

PLACES = st.lists(st.integers(0, MOST_PLACES - 1), min_size=1, max_size=30, unique=True)
SHAPES = st.sampled_from([Shape(PROOF_BYTES, 512), Shape(PROOF_BYTES, 1024), Shape(PROOF_BYTES)])


class IndexLife(RuleBasedStateMachine):
    """One disk, and one index after the other on it."""

    @initialize(shape=SHAPES, seed=st.integers(0, 1 << 30))
    def begin(self, shape: Shape, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.num_places = MOST_PLACES // 4
        self.serial = 0
        self.history = History()
        self.now: dict[int, bytes] = {}
        self.disk = SimDisk.blank(shape.file_bytes(MOST_PLACES))
        self.index = self.disk.index(STORE_ID, self.num_places, shape)

    # -- notes ----------------------------------------------------------------------------------

    @rule(places=PLACES, first_key=st.integers(0, 60))
    def write(self, places: list[int], first_key: int) -> None:
        places = [place for place in places if place < self.num_places]
        rows = []
        for at, place in enumerate(places):
            self.serial += 1
            rows.append(self.serial.to_bytes(PROOF_BYTES, "little"))
            (key,) = keys([first_key + at])
            self.history.events.append(Wrote(place, key, rows[-1]))
            self.now[place] = rows[-1]
        proofs = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, PROOF_BYTES)
        some = keys(range(first_key, first_key + len(places)))
        self.index.record_written(as_slots(places), some, proofs)

    @rule(places=PLACES)
    def lose(self, places: list[int]) -> None:
        places = [place for place in places if place < self.num_places]
        self.history.events += [Lost(place) for place in places]
        self.index.record_lost(as_slots(places))
        for place in places:
            self.now.pop(place, None)

    @rule()
    def forget(self) -> None:
        self.history.events.append(Forgot())
        self.index.reset(self.index.reset_number + 1)
        self.now.clear()

    # -- commits --------------------------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        noted = len(self.history.events)
        self.index.commit()
        self.history.promised = noted

    @rule(places=PLACES, first_key=st.integers(0, 60))
    def commit_what_came_before(self, places: list[int], first_key: int) -> None:
        noted, turn = len(self.history.events), self.index.num_recorded
        self.write(places, first_key)
        self.index.commit(turn)
        self.history.promised = noted

    @rule(
        turn=st.integers(0, 12),
        kind=st.sampled_from(["write", "sync", "short", "any"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        times=st.integers(1, 3),
    )
    def commit_on_a_bad_day(self, turn: int, kind: str, code: int, times: int) -> None:
        """Some call fails, and perhaps the next ones, and the process ends; a short write is no
        failure.
        """
        for file in self.disk.files:
            file.fault = Failing(turn, kind, code, times)
        has_failed, noted = False, len(self.history.events)
        try:
            self.index.commit()
            self.history.promised = noted
        except StoreError:
            assert kind != "short"
            has_failed = True
        for file in self.disk.files:
            file.fault = None
        if has_failed:
            self.open_again()

    # -- the end of a process -------------------------------------------------------------------

    @rule()
    def cut_power(self) -> None:
        left = next(images(self.disk.files, self.rng, 4))
        self.disk = SimDisk.holding(left)
        self.open_again()

    @rule()
    def kill(self) -> None:
        """The process is gone, the kernel is not: what was written can be read."""
        self.open_again()

    @rule(more=st.integers(0, MOST_PLACES))
    def close(self, more: int) -> None:
        """And open it, perhaps larger."""
        self.index.close()
        self.history.promised = len(self.history.events)
        self.num_places = min(MOST_PLACES, self.num_places + more)
        self.open_again()

    @precondition(lambda self: len(self.history.events) > 400)
    @rule()
    def tidy_up(self) -> None:
        """The model slows down: close, and begin a history of what is there."""
        self.close(0)

    def open_again(self) -> None:
        noted, promised = self.history.moment()
        self.index = self.disk.index(STORE_ID, self.num_places, self.shape)
        content = content_of(self.index)
        self.history.check(content, noted, promised)
        events: list[Event] = [Wrote(place, *what) for place, what in content.items()]
        self.history = History(events, len(events))
        self.now = {place: proof for place, (_, proof) in content.items()}

    @invariant()
    def memory_agrees(self) -> None:
        assert set(self.now) == set(self.index.present.nonzero()[0].tolist())
        for place, proof in self.now.items():
            assert self.index.proofs[place].tobytes() == proof


class Failing:
    """Fails some calls in a row, after others have worked."""

    def __init__(self, turn: int, kind: str, code: int, times: int) -> None:
        self.calls = 0
        self.turn, self.kind, self.code, self.times = turn, kind, code, times

    def __call__(self, what: str, offset: int, count: int) -> int | None:
        self.calls += 1
        if not self.turn < self.calls <= self.turn + self.times:
            return None
        if self.kind == "short":
            return max(1, count // 3) if what == "write" else None
        if self.kind in (what, "any"):
            raise OSError(self.code, f"injected at {what}")
        return None


TestIndexLife = IndexLife.TestCase
