"""Lives of an engine with blocks on disk, each ended by kill -9 at a random moment, then judged.

    python -m tests.fault.disk_lives FOLDER SEED COUNT [SECRET]

Every life is a fork of this process: it opens the store, judges what the life before left, then
writes, reads and forgets at random until it is killed, or its drive process is, or both. What was
asked and answered is written down in memory that outlives it. Block content and key follow from
place and version, so a block that is read says by itself whether it is right.

Now and then the store is reset from outside, as vLLM's scheduler does when it cannot reach the
engine: from then on nothing may be there again, also of what is written until the engine hears.

What is judged: a block that can be read is the one that was written; a block that was durable, and
neither overwritten nor forgotten since, can be read; nothing that was forgotten comes back once the
forgetting was durable, or anything written after it is there.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes.disk_life import setups

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Batch, BatchId, Result, Way
from kvferry.tiers.disk.state import reset_stores
from kvferry.tiers.disk.tier import DiskTier
from kvferry.types import Reset, TierName

NUM_PLACES = 48
BLOCK_BYTES = 8192
STORE_BYTES = 4 << 20
LIFE_SECONDS = 0.15
PATIENCE = 60.0
SECRET = sys.argv[4].encode() if len(sys.argv) > 4 else None
_FIELDS = ("version", "durable", "generation_of", "words")


class Notes:
    """What the engine of each life knew, in memory that its death does not touch."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 << 16)
        words = np.frombuffer(self._memory, dtype=np.int64)
        parts = words[: len(_FIELDS) * NUM_PLACES].reshape(len(_FIELDS), NUM_PLACES)
        self.version, self.durable, self.generation_of, rest = parts
        """Of the last write to each place: its number, submitted; the one known durable, or 0."""
        self.generation, self.forgotten, self.is_ready, self.num_checked, self.drive = (
            rest[at : at + 1] for at in range(5)
        )
        """How often all was forgotten: submitted, and known durable."""
        self.marked = rest[5:6]
        """Nothing of an earlier generation may be there again: marked, whoever has heard of it."""


def key_of(place: int, version: int) -> bytes:
    return blake2b(b"%d %d" % (place, version), digest_size=32).digest()


def content_of(place: int, version: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng((place, version))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def open_tier(folder: Path) -> DiskTier:
    """Once the drive of the life before, if it still lives, has done its last commit."""
    told = setups(
        folder, block_bytes=BLOCK_BYTES, size=STORE_BYTES, commit_seconds=0.01, key=SECRET
    )
    tier = DiskTier(TierName("disk"), told, start_deadline=PATIENCE)
    end = time.monotonic() + PATIENCE
    while not tier.is_open():
        assert time.monotonic() < end, tier.ailment
        time.sleep(0.01)
    return tier


class Life:
    """One life: owns the tier and the memory of its batches."""

    def __init__(self, folder: Path, notes: Notes, rng: random.Random) -> None:
        self.notes = notes
        self.rng = rng
        self.tier = open_tier(folder)
        notes.drive[0] = self.drive()
        self.next_id = 0
        self.under_way: dict[BatchId, tuple[Way, list[tuple[int, int]], Any]] = {}
        self.answered: dict[int, int] = {}
        self.marked_number = 0
        """The reset number that the store has, and this engine has not heard of; 0: none."""

    def drive(self) -> int:
        child = self.tier._drives[0]._child
        return child.pid if child is not None else 0

    def send(self, way: Way, blocks: list[tuple[int, int]]) -> None:
        rows = np.full((len(blocks), BLOCK_BYTES), 0xEE, dtype=np.uint8)
        if way is Way.WRITE:
            for row, block in zip(rows, blocks, strict=True):
                row[:] = content_of(*block)
        self.next_id += 1
        batch = Batch(
            BatchId(self.next_id),
            way,
            Keys.from_bytes(key_of(*block) for block in blocks),
            time.monotonic() + PATIENCE,
            rows.ctypes.data + np.arange(len(blocks))[:, None] * BLOCK_BYTES,
            np.array([BLOCK_BYTES]),
            np.array([place for place, _ in blocks]),
        )
        self.under_way[batch.id] = (way, blocks, rows)
        self.tier.submit(batch)

    def judge(self) -> None:
        notes = self.notes
        keys, places = self.tier.recovered()
        found = {}
        for key, place in zip(keys, places.tolist(), strict=True):
            version = next(
                (v for v in range(int(notes.version[place]), 0, -1) if key_of(place, v) == key), 0
            )
            assert version, f"place {place}: a block that was never written there"
            found[place] = version
        here = self.read_all(found)
        newest = 0
        for place in range(NUM_PLACES):
            durable = int(notes.durable[place])
            if durable and durable == notes.version[place]:
                assert here.get(place) == durable, f"place {place}: {durable} was durable"
            if here.get(place) == notes.version[place]:
                newest = max(newest, int(notes.generation_of[place]))
        # A version that was superseded may be of any earlier generation: those are not judged.
        least = max(newest, int(notes.forgotten[0]), int(notes.marked[0]))
        for place, version in here.items():
            if version == notes.version[place]:
                was = int(notes.generation_of[place])
                assert was >= least, f"place {place}: forgotten in {least}, and here from {was}"
        notes.num_checked[0] += len(here)
        for place in range(NUM_PLACES):
            notes.durable[place] = here.get(place, 0)
        self.answered = here
        notes.generation[0] = max(notes.generation[0], notes.marked[0])
        if notes.generation[0] > least:  # it may be forgotten or not: let it be
            notes.generation_of[list(here)] = notes.generation[0]

    def read_all(self, found: dict[int, int]) -> dict[int, int]:
        if not found:
            return {}
        blocks = sorted(found.items())
        self.send(Way.READ, blocks)
        (result,) = self.tier.drain(PATIENCE)
        _, _, rows = self.under_way.pop(result.batch_id)
        here = {}
        for at, (place, version) in enumerate(blocks):
            if result.ok[at]:
                assert (rows[at] == content_of(place, version)).all(), "wrong bytes"
                here[place] = version
        return here

    def go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.take_results(self.tier.poll())
            self.note_durable()
            busy = {place for _, blocks, _ in self.under_way.values() for place, _ in blocks}
            first = self.rng.randrange(NUM_PLACES)
            run = range(first, min(NUM_PLACES, first + self.rng.randint(1, 8)))
            free = [place for place in run if place not in busy]
            what = self.rng.random()
            if what < 0.005:
                self.mark()
            elif what < (0.06 if self.marked_number else 0.015):
                self.forget()
            elif what < 0.025 and self.drive():
                os.kill(self.drive(), signal.SIGKILL)
            elif free and what < 0.6 and len(self.under_way) < 6:
                self.write(free)
            elif free and len(self.under_way) < 6:
                there = [(place, self.answered[place]) for place in free if place in self.answered]
                if there:
                    self.send(Way.READ, there)
            time.sleep(0.001)

    def write(self, places: list[int]) -> None:
        notes = self.notes
        for place in places:
            self.answered.pop(place, None)
            notes.durable[place] = 0
            notes.generation_of[place] = notes.generation[0]
            notes.version[place] += 1
        self.send(Way.WRITE, [(place, int(notes.version[place])) for place in places])

    def mark(self) -> None:
        self.marked_number = time.time_ns()
        self.notes.durable[:] = 0
        told = reset_stores(self.tier.stores(), self.marked_number)
        assert not told, told
        self.notes.marked[0] = self.notes.generation[0] + 1

    def forget(self) -> None:
        self.notes.durable[:] = 0
        self.answered.clear()
        self.notes.generation[0] += 1
        self.tier.reset(Reset(self.marked_number or time.time_ns(), 0))
        self.marked_number = 0

    def take_results(self, results: list[Result]) -> None:
        for result in results:
            way, blocks, rows = self.under_way.pop(result.batch_id)
            for at, (place, version) in enumerate(blocks):
                if way is Way.WRITE and result.ok[at]:
                    if self.notes.generation_of[place] == self.notes.generation[0]:
                        self.answered[place] = version
                elif way is Way.READ and result.ok[at]:
                    assert (rows[at] == content_of(place, version)).all(), "wrong bytes"
                elif way is Way.READ and self.notes.durable[place] == version:
                    why = result.reasons[at]
                    assert not re.search("holds nothing|not what", why), f"durable, but {why}"

    def note_durable(self) -> None:
        """Whatever was answered before nothing was pending is durable."""
        drive = self.tier._drives[0]
        before, starts = dict(self.answered), self.tier.figures().restarts
        with self.tier._changed:
            if drive.has_forgotten:
                self.notes.forgotten[0] = self.notes.generation[0]
        figures = self.tier.figures()
        is_same = starts == figures.restarts == self._starts and not self.tier.ailment
        self._starts = figures.restarts
        if not is_same:
            for place in [p for p, v in self.answered.items() if self.notes.durable[p] != v]:
                del self.answered[place]  # a drive that died may have lost it
        elif self.marked_number:
            return
        elif not figures.pending and not figures.durable_lag and drive.has_forgotten:
            for place, version in before.items():
                self.notes.durable[place] = version

    _starts = 0


def live(folder: Path, notes: Notes, seed: int) -> None:
    rng = random.Random(seed)
    life = Life(folder, notes, rng)
    life.judge()
    notes.is_ready[0] = 1
    life.go_on(LIFE_SECONDS)
    life.tier.close()


def main() -> int:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng, notes = random.Random(seed), Notes()
    kills = 0
    # On a busy machine lives may end before anything is durable: then there are more of them.
    while kills < count or (notes.num_checked[0] <= count and kills < 3 * count):
        notes.is_ready[0] = notes.drive[0] = 0
        pid = os.fork()
        if not pid:
            try:
                live(folder, notes, rng.randrange(1 << 30))
                os._exit(0)
            except BaseException as error:
                print(f"life {kills}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        rng.random()  # as the child drew
        status = kill_in_time(pid, notes, rng)
        if status > 0:
            return 1
        kills += status < 0
    print(f"{kills} kills, {int(notes.num_checked[0])} blocks found again and right")
    return 0


def kill_in_time(pid: int, notes: Notes, rng: random.Random) -> int:
    """Kill it, before it is open or after, with its drive or without; its exit code."""
    start = time.monotonic()
    if rng.random() < 0.8:
        while not notes.is_ready[0] and time.monotonic() - start < PATIENCE:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        time.sleep(rng.uniform(0, LIFE_SECONDS))
    else:
        time.sleep(rng.uniform(0, 0.3))
    drive = int(notes.drive[0])
    if drive and rng.random() < 0.7:
        with suppress(ProcessLookupError):
            os.kill(drive, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
