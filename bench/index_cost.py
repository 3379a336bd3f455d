"""Host cost of bookkeeping, per 8192 keys: match, reserve + commit, pin + release.

Four ways, in one run on one machine:

- ``kvferry``: the pool, one call per request.
- ``lean``: key after key in the leanest Python we can write: one ordered dict, a two-item list per
  block, loops in line.
- ``layered``: key after key as we understand published Python offload indexes to be built: a call
  per key through a policy object, a ctypes record per block. Written from general knowledge of
  them, not checked against any; what they themselves were measured at is in ``TARGET_MS``.
- ``dict``: ``list(map(index.get, keys))``, the floor for a look-up in Python; no states, no counts.

Requests are chains of 8192 keys; pools hold 10k, 100k and 1M of them and are full, so that every
store evicts as much as it adds. The table gives the best of several rounds over different requests.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from kvferry.keys import KEY_WORDS, Keys
from kvferry.pool import Pool
from kvferry.types import Key

KEYS = 8192
SIZES = (10_000, 100_000, 1_000_000)
TARGET_MS = {"match": 5.5 / 10, "reserve+commit": 15 / 5, "pin+release": 10 / 5}
"""What each operation may cost: so many times less than the published index was measured at."""


class BlockStatus(ctypes.Structure):
    """What such an index keeps per block: small, but a Python object each."""

    _fields_ = (("refs", ctypes.c_int32), ("slot", ctypes.c_int64))

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.refs = -1  # being written
        self.slot = slot

    @property
    def is_ready(self) -> bool:
        return bool(self.refs >= 0)


class Answer(Enum):
    """What a look-up of one key says."""

    MISS = "miss"
    HIT = "hit"


class PerKeyLru:
    """The eviction policy of the per-key index: an ordered dict, oldest first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[Key, BlockStatus] = OrderedDict()

    def get(self, key: Key) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: Key, block: BlockStatus) -> None:
        self.blocks[key] = block

    def touch(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(self, count: int, protected: set[Key]) -> list[BlockStatus]:
        chosen = []
        for key, block in self.blocks.items():
            if block.refs == 0 and key not in protected:
                chosen.append(key)
                if len(chosen) == count:
                    break
        return [self.blocks.pop(key) for key in chosen]


class PerKeyIndex:
    """An offload index that does its work one key at a time."""

    def __init__(self, num_slots: int) -> None:
        self.policy = PerKeyLru()
        self.free = list(range(num_slots))

    def lookup(self, key: Key) -> Answer:
        block = self.policy.get(key)
        return Answer.HIT if block is not None and block.is_ready else Answer.MISS

    def match(self, keys: list[Key]) -> int:
        count = 0
        for key in keys:
            if self.lookup(key) is not Answer.HIT:
                break
            count += 1
        return count

    def prepare_store(self, keys: list[Key]) -> list[Key]:
        missing = [key for key in keys if self.policy.get(key) is None]
        lacking = len(missing) - len(self.free)
        if lacking > 0:
            for block in self.policy.evict(lacking, set(keys)):
                self.free.append(block.slot)
        for key in missing:
            self.policy.insert(key, BlockStatus(self.free.pop()))
        return missing

    def complete_store(self, keys: list[Key]) -> None:
        for key in keys:
            block = self.policy.get(key)
            if block is not None and not block.is_ready:
                block.refs = 0
        self.policy.touch(keys)

    def prepare_load(self, keys: list[Key]) -> list[int]:
        slots = []
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.is_ready
            block.refs += 1
            slots.append(block.slot)
        return slots

    def complete_load(self, keys: list[Key]) -> None:
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.refs > 0
            block.refs -= 1
        self.policy.touch(keys)


class LeanIndex:
    """The same work, one key at a time, with nothing between the loop and the dict."""

    def __init__(self, num_slots: int) -> None:
        self.blocks: OrderedDict[Key, list[int]] = OrderedDict()  # references (-1: writing), slot
        self.free = list(range(num_slots))

    def match(self, keys: list[Key]) -> int:
        get = self.blocks.get
        count = 0
        for key in keys:
            block = get(key)
            if block is None or block[0] < 0:
                break
            count += 1
        return count

    def prepare_store(self, keys: list[Key]) -> list[Key]:
        blocks, free = self.blocks, self.free
        missing = [key for key in keys if key not in blocks]
        lacking = len(missing) - len(free)
        if lacking > 0:
            protected = set(keys)
            chosen = []
            for key, block in blocks.items():
                if block[0] == 0 and key not in protected:
                    chosen.append(key)
                    if len(chosen) == lacking:
                        break
            free.extend(blocks.pop(key)[1] for key in chosen)
        for key in missing:
            blocks[key] = [-1, free.pop()]
        return missing

    def complete_store(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.blocks[key][0] = 0
            self.blocks.move_to_end(key)

    def prepare_load(self, keys: list[Key]) -> list[int]:
        slots = []
        for key in keys:
            block = self.blocks[key]
            block[0] += 1
            slots.append(block[1])
        return slots

    def complete_load(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.blocks[key][0] -= 1
            self.blocks.move_to_end(key)


@dataclass
class Row:
    """One operation at one pool size; milliseconds per 8192 keys."""

    operation: str
    slots: int
    kvferry_ms: float
    lean_ms: float
    layered_ms: float
    dict_ms: float | None = None


def requests(count: int, seed: int, length: int = KEYS) -> Iterator[Keys]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield Keys(rng.integers(0, 1 << 63, (length, KEY_WORDS), dtype=np.uint64))


def best_ms(work: Callable[[int], object], rounds: int) -> float:
    times = []
    for number in range(rounds):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def store(pool: Pool, keys: Keys) -> None:
    lease = pool.reserve(keys)
    assert lease is not None
    assert len(lease) == len(keys)
    lease.commit()


def load(pool: Pool, keys: Keys) -> None:
    lease = pool.pin(keys)
    assert lease is not None
    assert len(lease) == len(keys)
    lease.release()


def measure_kvferry(num_slots: int, length: int, rounds: int) -> tuple[float, float, float]:
    pool = Pool(num_slots)
    resident = list(requests(num_slots // length + 1, 1, length))
    for keys in resident:
        store(pool, keys)
    recent = [resident[-1 - number % max(1, num_slots // length - 1)] for number in range(rounds)]
    for keys in reversed(recent):
        store_missing(pool, keys)
    matching = best_ms(lambda n: require(pool.match(recent[n]) == length), rounds)
    pinning = best_ms(lambda n: load(pool, recent[n]), rounds)
    fresh = list(requests(rounds, 2, length))
    storing = best_ms(lambda n: store(pool, fresh[n]), rounds)
    return matching, storing, pinning


def store_missing(pool: Pool, keys: Keys) -> None:
    lease = pool.reserve(keys)
    if lease is not None:
        lease.commit()


def measure_per_key(
    index: LeanIndex | PerKeyIndex, num_slots: int, length: int, rounds: int
) -> tuple[float, float, float]:
    resident = [list(keys) for keys in requests(num_slots // length + 1, 1, length)]
    for keys in resident:
        index.complete_store(index.prepare_store(keys))
    recent = [resident[-1 - number % max(1, num_slots // length - 1)] for number in range(rounds)]
    for keys in reversed(recent):
        index.complete_store(index.prepare_store(keys))
    matching = best_ms(lambda n: require(index.match(recent[n]) == length), rounds)

    def one_load(number: int) -> None:
        index.prepare_load(recent[number])
        index.complete_load(recent[number])

    pinning = best_ms(one_load, rounds)
    fresh = [list(keys) for keys in requests(rounds, 2, length)]
    storing = best_ms(lambda n: index.complete_store(index.prepare_store(fresh[n])), rounds)
    return matching, storing, pinning


def measure_dict(num_slots: int, length: int, rounds: int) -> float:
    resident = [list(keys) for keys in requests(max(1, num_slots // length), 1, length)]
    index = {key: slot for slot, key in enumerate(key for keys in resident for key in keys)}
    return best_ms(lambda n: list(map(index.get, resident[-1 - n % len(resident)])), rounds)


def require(holds: bool) -> None:
    if not holds:
        raise AssertionError("the benchmark does not measure what it says")


def measure(num_slots: int, rounds: int) -> list[Row]:
    length = KEYS
    ours = measure_kvferry(num_slots, length, rounds)
    lean = measure_per_key(LeanIndex(num_slots), num_slots, length, rounds)
    layered = measure_per_key(PerKeyIndex(num_slots), num_slots, length, rounds)
    floor = measure_dict(num_slots, length, rounds)
    names = ("match", "reserve+commit", "pin+release")
    return [
        Row(name, num_slots, mine, thin, thick, floor if name == "match" else None)
        for name, mine, thin, thick in zip(names, ours, lean, layered, strict=True)
    ]


def show(rows: list[Row]) -> bool:
    print(f"per {KEYS} keys, {platform.machine()}, Python {platform.python_version()}, "
          f"numpy {np.__version__}\n")  # fmt: skip
    head = ("operation", "slots", "kvferry ms", "us/key", "lean ms", "layered ms", "dict ms")
    print("{:<15}{:>9}{:>12}{:>9}{:>17}{:>17}{:>9}".format(*head))
    for row in rows:
        floor = f"{row.dict_ms:9.2f}" if row.dict_ms is not None else f"{'-':>9}"
        print(
            f"{row.operation:<15}{row.slots:>9}{row.kvferry_ms:>12.3f}"
            f"{1e3 * row.kvferry_ms / KEYS:>9.4f}{beside(row.lean_ms, row):>17}"
            f"{beside(row.layered_ms, row):>17}{floor}"
        )
    good = True
    print()
    for name, target in TARGET_MS.items():
        mine = [row for row in rows if row.operation == name]
        worst = max(row.kvferry_ms for row in mine)
        growth = mine[-1].kvferry_ms / mine[0].kvferry_ms
        lean_growth = mine[-1].lean_ms / mine[0].lean_ms
        good &= worst <= target
        print(
            f"{name:<15} worst {worst:.3f} ms, at most {target:.2f} wanted: "
            f"{'kept' if worst <= target else 'NOT KEPT'}; {mine[0].slots} -> {mine[-1].slots} "
            f"slots costs x{growth:.2f} per key (lean x{lean_growth:.2f})"
        )
    return good


def beside(other_ms: float, row: Row) -> str:
    return f"{other_ms:.2f} ({other_ms / row.kvferry_ms:.1f}x)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 100k slots")
    arguments = parser.parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    rows = [row for size in sizes for row in measure(size, 5 if arguments.quick else 15)]
    rows.sort(key=lambda row: (list(TARGET_MS).index(row.operation), row.slots))
    good = show(rows)
    if arguments.json is not None:
        figures = {
            "keys": KEYS,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "kept": good,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
