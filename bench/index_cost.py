"""Host cost of bookkeeping, per 8192 keys: match, reserve + commit, pin + release.

And, for the pool alone, of requests with few keys, where calls cost more than keys.

Four ways, in one run on one machine:

- ``kvferry``: the pool, one call per request.
- ``lean`` and ``layered``: key after key in plain Python, see ``indexes/per_key.py``.
- ``dict``: ``list(map(index.get, keys))``, the floor for a look-up in Python; no states, no counts.

Requests are chains of 8192 keys; pools hold 10k, 100k and 1M of them and are full, so that every
store evicts as much as it adds. Each way is measured under the same conditions:

- ``hot``: one request again and again; nothing happens between two rounds.
- ``cold``: the same, but before each round 64 MiB of other memory are walked, as a model's step and
  the rest of a server would.
- ``other``: another request in each round, as far as the pool holds several. The pool of 10k holds
  one, so it is hot there and not elsewhere.
- ``worn``: hot, in a pool that has seen requests of mixed lengths come, grow and go, three times as
  many blocks as it holds. Not at 10k, where one request takes the place of four fifths of that; and
  for the same reason with fewer stores than elsewhere at 100k.
- ``strewn``: hot, for the pool alone, which is made to give out its slots in random order: the
  worst that use could come to.

In all but ``other`` the keys that are asked for are walked right before, because they
have just been made. Storing takes new keys in every round. The tables give the best round of all
passes; a pass takes all sizes in turn.

``bare`` is what no index can avoid when it stores a key and forgets another: numpy fetches, writes
and clears as many random places of arrays as large as the pool's table, and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from indexes.per_key import LeanIndex, PerKeyIndex
from kvferry.cache.pool import Pool
from kvferry.core.keys import KEY_WORDS, KeyArray, Keys

KEYS = 8192
FEW_KEYS = (1, 32, 256)
SIZES = (10_000, 100_000, 1_000_000)
CONDITIONS = ("hot", "cold", "other", "worn", "strewn")
OPERATIONS = ("match", "reserve+commit", "pin+release")
WAYS = ("kvferry", "lean", "layered", "dict", "bare")
TARGET_MS = {"match": 5.5 / 10, "reserve+commit": 15 / 5, "pin+release": 10 / 5}
"""What each operation may cost: so many times less than the published index was measured at."""

Request = Any  # Keys, or a list of bytes


class Ours:
    """The pool."""

    def __init__(self, num_slots: int) -> None:
        self.pool = Pool(num_slots)

    def request(self, keys: Keys) -> Request:
        return keys

    def walk(self, keys: Request) -> None:
        keys.array.max()

    def match(self, keys: Request) -> int:
        return self.pool.match(keys)

    def store(self, keys: Request) -> None:
        lease = self.pool.reserve(keys)
        if lease is not None:
            lease.commit()

    def load(self, keys: Request) -> None:
        lease = self.pool.lease(keys)
        assert lease is not None
        assert len(lease) == len(keys)
        lease.release()


class PerKey:
    """An index that takes key after key."""

    def __init__(self, index: LeanIndex | PerKeyIndex) -> None:
        self.index = index
        self.match = index.match

    def request(self, keys: Keys) -> Request:
        return list(keys)

    def walk(self, keys: Request) -> None:
        sum(map(hash, keys))

    def store(self, keys: Request) -> None:
        self.index.complete_store(self.index.prepare_store(keys))

    def load(self, keys: Request) -> None:
        self.index.prepare_load(keys)
        self.index.complete_load(keys)


class Bare:
    """The random places alone: as many bytes per slot as the pool's table has, and no index."""

    def __init__(self, num_slots: int) -> None:
        rows = num_slots * 5 // 8
        words = np.full(5 * rows, 0, dtype=np.uint64)
        self.tags, slots = np.split(words, [rows])
        self.slots, self.bytes = slots.view(np.int32), self.tags.view(np.uint8)
        self.rng = np.random.default_rng(3)
        self.values = np.ones(KEYS, dtype=np.int32)

    def places(self) -> tuple[Any, Any]:
        rows = self.rng.integers(0, len(self.tags), (2, KEYS))
        return rows[0], rows[1] * 8 + 3

    def store(self, places: tuple[Any, Any]) -> None:
        come, go = places
        self.bytes[go] = 0
        self.tags.take(come)
        at = come * 8 + 3
        self.bytes[at] = 1
        self.slots[at] = self.values


@dataclass
class Clock:
    """Best times by (way, operation, slots, condition), over everything measured so far."""

    best: dict[tuple[str, str, int, str], float] = field(default_factory=dict)
    other: np.ndarray = field(default_factory=lambda: np.ones((64 << 20) // 8))

    def time(
        self, name: tuple[str, str, int, str], work: Callable[[Any], object],
        requests: list[Any], walk: Callable[[Any], object],
    ) -> None:  # fmt: skip
        for request in requests:
            if name[-1] == "cold":
                np.add(self.other, 1, out=self.other)
            if name[-1] != "other":
                walk(request)
            start = time.perf_counter()
            work(request)
            taken = 1e3 * (time.perf_counter() - start)
            self.best[name] = min(taken, self.best.get(name, taken))


def new_keys(count: int, seed: int, length: int = KEYS) -> Iterator[Keys]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield Keys(rng.integers(0, 1 << 63, (length, KEY_WORDS), dtype=np.uint64))


def fill(way: Ours | PerKey, num_slots: int) -> list[Request]:
    """Store requests until the pool is full; returns those that are there.

    Not the newest first: its slots are where the list of free ones met its end, which at 10k is a
    single run by chance and at other sizes is not.
    """
    resident = [way.request(keys) for keys in new_keys(num_slots // KEYS + 1, 1)]
    for keys in resident:
        way.store(keys)
    recent = resident[: -max(2, num_slots // KEYS) : -1]
    for keys in reversed(recent):
        way.store(keys)
    return recent[1:] + recent[:1]


def wear(way: Ours | PerKey, num_slots: int) -> list[Request]:
    """Requests of 16 to 2048 keys, two in three a turn of up to 64 keys on top of an older one."""
    rng = np.random.default_rng(2)
    pieces = rng.integers(0, 1 << 63, (1 << 16, KEY_WORDS), dtype=np.uint64)
    stored = 0
    chats: list[KeyArray] = []
    while stored < 3 * num_slots:
        length = int(2 ** rng.uniform(4, 11))
        if len(chats) > 8 and rng.random() < 2 / 3:
            chat = chats.pop(int(rng.integers(len(chats))))
            length = int(rng.integers(1, 65))
        else:
            chat = np.empty((0, KEY_WORDS), dtype=np.uint64)
        at = int(rng.integers(len(pieces) - length))
        # New keys: old ones with a number of their own mixed in.
        chat = np.concatenate((chat, pieces[at : at + length] ^ np.uint64(rng.integers(1 << 62))))
        stored += length
        chats.append(chat)
        if len(chats) > num_slots // 400 + 8:
            chats.pop(0)
        way.store(way.request(Keys(chat)))
    requests = [way.request(keys) for keys in new_keys(2, 4)]
    for keys in requests:
        way.store(keys)
    return requests


def measure(clock: Clock, name: str, make: Callable[[int], Ours | PerKey], num_slots: int,
            rounds: int) -> None:  # fmt: skip
    seed = 10
    for conditions in (("hot", "cold", "other"), ("worn",)):
        wearable = num_slots // (4 * KEYS)  # requests that leave most of a pool as it was
        if conditions == ("worn",) and not wearable:
            continue
        way = make(num_slots)
        recent = (wear if conditions == ("worn",) else fill)(way, num_slots)
        require(all(way.match(keys) == KEYS for keys in recent))
        for condition in conditions:
            asked = [recent[n % len(recent) if condition == "other" else 0] for n in range(rounds)]
            clock.time((name, "match", num_slots, condition), way.match, asked, way.walk)
            clock.time((name, "pin+release", num_slots, condition), way.load, asked, way.walk)
        for condition in conditions:
            seed += 1
            count = min(rounds, wearable) if condition == "worn" else rounds
            fresh = [way.request(keys) for keys in new_keys(count, seed)]
            clock.time((name, "reserve+commit", num_slots, condition), way.store, fresh, way.walk)
            require(way.match(fresh[-1]) == KEYS)


def measure_strewn(clock: Clock, num_slots: int, rounds: int) -> None:
    way = Ours(num_slots)
    np.random.default_rng(5).shuffle(way.pool.table.free.slots)
    resident = list(new_keys(num_slots // KEYS, 1))
    for keys in resident:
        way.store(keys)
    asked = resident[-1:] * rounds
    clock.time(("kvferry", "match", num_slots, "strewn"), way.match, asked, way.walk)
    clock.time(("kvferry", "pin+release", num_slots, "strewn"), way.load, asked, way.walk)


def measure_few(rounds: int) -> dict[tuple[str, int], float]:
    """Microseconds for requests of few keys in a full pool, by operation and number of keys."""
    best: dict[tuple[str, int], float] = {}
    for length in FEW_KEYS:
        way = Ours(20 * KEYS)
        for keys in new_keys(20 * KEYS // length + 2, 6, length):
            way.store(keys)
        for keys in new_keys(rounds, 7, length):
            way.store(keys)
            for operation, work in zip(OPERATIONS, (way.match, way.store, way.load), strict=True):
                asked = Keys(keys.array ^ np.uint64(1)) if work == way.store else keys
                start = time.perf_counter()
                work(asked)
                taken = 1e6 * (time.perf_counter() - start)
                best[operation, length] = min(taken, best.get((operation, length), taken))
    return best


def measure_floors(clock: Clock, num_slots: int, rounds: int) -> None:
    resident = [list(keys) for keys in new_keys(max(1, num_slots // KEYS), 1)]
    index = {key: slot for slot, key in enumerate(key for keys in resident for key in keys)}
    bare = Bare(num_slots)
    for condition in CONDITIONS[:3]:
        asked = [resident[n % len(resident) if condition == "other" else 0] for n in range(rounds)]
        clock.time(
            ("dict", "match", num_slots, condition),
            lambda keys: list(map(index.get, keys)), asked, lambda keys: sum(map(hash, keys)),
        )  # fmt: skip
        places = [bare.places() for _ in range(rounds)]
        clock.time(
            ("bare", "reserve+commit", num_slots, condition),
            bare.store, places, lambda rows: rows[0].max() + rows[1].max(),
        )  # fmt: skip


def require(holds: bool) -> None:
    if not holds:
        raise AssertionError("the benchmark does not measure what it says")


def show(clock: Clock, sizes: tuple[int, ...]) -> bool:
    print(f"ms per {KEYS} keys, {platform.machine()}, Python {platform.python_version()}, "
          f"numpy {np.__version__}")  # fmt: skip
    good = True
    every_size = sizes
    for condition in CONDITIONS:
        sizes = tuple(
            size for size in every_size if ("kvferry", "match", size, condition) in clock.best
        )
        print(f"\n{condition:<15}{'slots':>9}" + "".join(f"{way:>10}" for way in WAYS))
        for operation in OPERATIONS:
            for size in sizes:
                if ("kvferry", operation, size, condition) not in clock.best:
                    continue
                cells = (clock.best.get((way, operation, size, condition)) for way in WAYS)
                row = "".join(f"{'-' if ms is None else f'{ms:.3f}':>10}" for ms in cells)
                print(f"{operation:<15}{size:>9}{row}")
        for operation, target in TARGET_MS.items():
            mine = [clock.best.get(("kvferry", operation, size, condition), 0) for size in sizes]
            if not all(mine):
                continue
            good &= max(mine) <= target
            grown = ", ".join(
                f"{way} x{last / first:.2f}"
                for way in WAYS
                if (first := clock.best.get((way, operation, sizes[0], condition)))
                and (last := clock.best.get((way, operation, sizes[-1], condition)))
            )
            print(f"  {operation}: at most {target:.2f} wanted, {max(mine):.3f} is the most: "
                  f"{'kept' if max(mine) <= target else 'NOT KEPT'}; "
                  f"from {sizes[0]} to {sizes[-1]} slots {grown}")  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="one pass, at most 100k slots")
    parser.add_argument("--ours", action="store_true", help="the pool alone, and bare")
    arguments = parser.parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    ways: dict[str, Callable[[int], Ours | PerKey]] = {"kvferry": Ours}
    if not arguments.ours:
        ways["lean"] = lambda num_slots: PerKey(LeanIndex(num_slots))
        ways["layered"] = lambda num_slots: PerKey(PerKeyIndex(num_slots))
    clock = Clock()
    for _ in range(1 if arguments.quick else 3):
        for size in sizes:
            for name, make in ways.items():
                measure(clock, name, make, size, 15)
            measure_strewn(clock, size, 15)
            measure_floors(clock, size, 15)
    good = show(clock, sizes)
    few = measure_few(200 if arguments.quick else 2000)
    print(f"\n{'us, few keys':<15}" + "".join(f"{length:>10}" for length in FEW_KEYS))
    for operation in OPERATIONS:
        row = "".join(f"{few[operation, length]:>10.1f}" for length in FEW_KEYS)
        print(f"{operation:<15}{row}")
    if arguments.json is not None:
        rows = [
            {"way": way, "operation": operation, "slots": size, "condition": condition, "ms": ms}
            for (way, operation, size, condition), ms in sorted(clock.best.items())
        ]
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        small = [
            {"operation": operation, "keys": length, "us": us}
            for (operation, length), us in sorted(few.items())
        ]
        figures = {"keys": KEYS, **versions, "kept": good, "rows": rows, "few_keys": small}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
