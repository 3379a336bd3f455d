"""Servers that share a store write, find and read chains that fork, in objects of any length.

Whatever they do, and whatever befalls objects: what is read is the block asked for, what was just
written is found, and what was found can be read as long as nobody touched the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.fakes.packed_store import PackedStore

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Way
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import OrderMessage
from kvferry.tiers.remote.client import Fault, Fetched, Foreign, Log, Staging, Unavailable
from kvferry.tiers.remote.objects import (
    ObjectFormat,
    ObjectIndex,
    PackLookup,
    most_in_one,
    pack_objects,
)
from kvferry.tiers.remote.process import StoreTransfers

SIZE, LENGTH = 24, 6
OBJECTS = ObjectFormat(b"n" * 32, SIZE)
OBJECT = OBJECTS.object_bytes


FULL = Fault("it is full")


class Objects(dict[str, bytes]):
    """What the store holds, by name; while it ``is_full`` it takes nothing."""

    is_full = False


class Shelf:
    """A store's client over a dict, which other clients have too."""

    num_calls = 4

    def __init__(self, objects: Objects, in_one: int, *, minds: bool) -> None:
        self.objects = objects
        self.blocks_per_object = in_one
        self.staging = Staging(in_one * OBJECT, 2 * self.num_calls)
        self._minds = minds

    def names_per_call(self, way: Way) -> int:
        return 2 if way is Way.FIND else 1

    async def probe(self, way: Way) -> Fault | None:
        return FULL if way is Way.WRITE and self.objects.is_full else None

    async def tend(self, log: Log) -> None:
        pass

    async def find(self, names: Sequence[str], size: int) -> list[int | Unavailable | Fault]:
        return [self._count(name, size) for name in names]

    def _count(self, name: str, size: int) -> int | Unavailable:
        if name not in self.objects:
            return Unavailable()
        count, rest = divmod(len(self.objects[name]), size)
        is_ours = not rest and 1 <= count <= most_in_one(size)
        return count if is_ours else Foreign("of another size")

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview]
    ) -> list[Fetched]:
        counts = await self.find(names, size)
        return [
            memoryview(self.objects[name]) if isinstance(count, int) else count
            for name, count in zip(names, counts, strict=True)
        ]

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        for name, stored, again in zip(names, objects, replace, strict=True):
            there = len(self.objects.get(name, b""))
            if self.objects.is_full:
                pass
            elif not self._minds or again or name not in self.objects or there < len(stored):
                self.objects[name] = bytes(stored)
            self.staging.give_back(stored)
        return [FULL if self.objects.is_full else None] * len(names)

    async def forget(self, folder: str) -> None:
        pass

    def close(self) -> None:
        pass


class Server:
    """One process of a fleet: its transfers, and the slots of its engine."""

    def __init__(self, objects: Objects, in_one: int, *, minds: bool) -> None:
        shelf = Shelf(objects, in_one, minds=minds)
        memory = EngineMemory(os.getpid(), None)
        self.transfers = StoreTransfers(shelf, OBJECTS, memory, None, lambda *_: None)

    def do(self, loop: asyncio.AbstractEventLoop, way: Way, chain: Sequence[bytes]) -> list[bool]:
        """Carry a run of blocks out, and see that what comes is right."""
        keys = Keys.from_bytes(chain)
        rows = np.full((len(chain), SIZE), 0xEE, dtype=np.uint8)
        if way is Way.WRITE:
            rows[:] = [list(content(key)) for key in chain]
        order = OrderMessage(
            1,
            way,
            0,
            time.monotonic() + 60.0,
            np.zeros(len(chain), dtype=np.int64),
            keys.array,
            np.array([SIZE], dtype=np.int64),
            (rows.ctypes.data + np.arange(len(chain)) * SIZE)[:, None],
            np.zeros(len(chain), dtype=np.int64),
        )
        result = loop.run_until_complete(self.transfers.carry(self.transfers.begin(order)))
        if way is Way.READ:
            for row, key, ok in zip(rows, chain, result.ok, strict=True):
                assert row.tobytes() == (content(key) if ok else b"\xee" * SIZE)
        return list(result.ok.tolist())


def content(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=SIZE, person=b"content").digest()


def chain_of(turns: Sequence[int]) -> list[bytes]:
    """Keys of a chain: each stands for all before it."""
    return [
        hashlib.blake2b(bytes(turns[: n + 1]), digest_size=32).digest() for n in range(len(turns))
    ]


_chains = st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH).map(chain_of)
_servers = st.integers(0, 2)


class Fleet(RuleBasedStateMachine):
    """Three servers with settings of their own, on one store."""

    @initialize(minds=st.booleans(), packs=st.tuples(*[st.integers(1, 5)] * 3))
    def begin(self, minds: bool, packs: tuple[int, ...]) -> None:
        self.loop = asyncio.new_event_loop()
        self.minds = minds
        self.objects = Objects()
        self.servers = [Server(self.objects, pack, minds=minds) for pack in packs]
        self.is_sound = True
        self.kept: set[bytes] = set()  # found by its whole chain once, where nothing is overwritten

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    @rule(server=_servers, chain=_chains, start=st.integers(0, LENGTH))
    def write(self, server: int, chain: list[bytes], start: int) -> None:
        going = chain[start:] or chain
        written = self.servers[server].do(self.loop, Way.WRITE, going)
        if self.objects.is_full:
            assert not any(written)
            return
        health = self.servers[server].transfers.health
        if health.ailment(Way.WRITE):  # it was full, and has not been probed since
            assert not any(written)
            self.loop.run_until_complete(health.probe(Way.WRITE, 60.0))
            written = self.servers[server].do(self.loop, Way.WRITE, going)
        assert all(written)
        if self.is_sound:
            assert all(self._fresh().do(self.loop, Way.FIND, going)), "it was just written"

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.objects.is_full = is_full

    @precondition(lambda self: not self.objects.is_full)
    @rule(server=_servers, chain=_chains)
    def heal(self, server: int, chain: list[bytes]) -> None:
        """Who finds, reads, and writes what it lacks has all of it in the end."""
        one = self.servers[server]
        self.loop.run_until_complete(one.transfers.health.probe(Way.WRITE, 60.0))
        for _ in range(3 * LENGTH):
            found = one.do(self.loop, Way.FIND, chain)
            if all(found) and all(one.do(self.loop, Way.READ, chain)):
                return
            one.do(self.loop, Way.READ, chain)
            one.do(self.loop, Way.WRITE, chain)
        raise AssertionError("what is bad is never replaced")

    @rule(server=_servers, chain=_chains, start=st.integers(0, LENGTH))
    def find_and_read(self, server: int, chain: list[bytes], start: int) -> None:
        run = chain[start:] or chain
        found = self.servers[server].do(self.loop, Way.FIND, run)
        there = [key for key, ok in zip(run, found, strict=True) if ok]
        if not there:
            return
        read = self.servers[server].do(self.loop, Way.READ, there)
        if self.is_sound:
            assert all(read), "what was found is there"
        again = self.servers[server].do(self.loop, Way.FIND, run)
        lost = [key for key, ok in zip(there, read, strict=True) if not ok]
        yes = {key for key, ok in zip(run, again, strict=True) if ok}
        assert not yes & set(lost), "nobody is told twice of what is not there"

    @rule(server=_servers, chain=_chains)
    def read_unasked(self, server: int, chain: list[bytes]) -> None:
        self.servers[server].do(self.loop, Way.READ, chain)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def harm(self, data: st.DataObject) -> None:
        """Flip a bit, cut it, put it in another's place, or remove it."""
        name = data.draw(st.sampled_from(sorted(self.objects)))
        stored = self.objects[name]
        how = data.draw(st.sampled_from(["flip", "cut", "swap", "remove"]))
        if how == "flip" and stored:
            at = data.draw(st.integers(0, len(stored) - 1))
            self.objects[name] = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        elif how == "cut":
            self.objects[name] = stored[: data.draw(st.integers(0, len(stored)))]
        elif how == "swap":
            self.objects[name] = self.objects[data.draw(st.sampled_from(sorted(self.objects)))]
        else:
            del self.objects[name]
        self.is_sound = False

    @invariant()
    def what_was_found_stays(self) -> None:
        """Where the server minds the condition and nothing is harmed, blocks only come."""
        if not getattr(self, "minds", False) or not self.is_sound:
            return
        longest = [chain_of([n >> at & 1 for at in range(LENGTH)]) for n in (0, 1, 2, 21, 63)]
        there: set[bytes] = set()
        for chain in longest:
            found = self._fresh().do(self.loop, Way.FIND, chain)
            there.update(key for key, ok in zip(chain, found, strict=True) if ok)
        assert self.kept <= there
        self.kept = there

    @invariant()
    def it_is_read_whatever_writes_do(self) -> None:
        for each in getattr(self, "servers", ()):
            assert not each.transfers.health.ailment(Way.READ)

    def _fresh(self) -> Server:
        """One that knows nothing yet."""
        return Server(self.objects, 3, minds=self.minds)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)


# -- the parts, by themselves ----------------------------------------------------------------------

_runs = st.lists(st.integers(0, 1), max_size=30).map(lambda ends: np.cumsum([0, *ends]))


@given(runs=_runs, most=st.integers(1, 9))
def test_a_cut_loses_nothing_and_joins_only_what_follows(runs: np.ndarray, most: int) -> None:
    names = [str(at) for at in range(len(runs))]
    objects = pack_objects(names, runs, most)
    assert [at for each in objects for at in each.positions] == list(range(len(runs)))
    for each in objects:
        assert len(set(runs[list(each.positions)])) == 1
        assert 1 <= each.num_blocks == len(each.positions) <= most
        assert each.name == names[each.positions[-1]]
        assert list(each.behind) == list(range(each.num_blocks))[::-1]
    of_one = [each for each in objects if each.num_blocks < most]
    assert len(of_one) <= len(set(runs.tolist())), "one rest for each run, no more"


@given(
    runs=_runs,
    most=st.integers(1, 9),
    objects=st.dictionaries(st.integers(0, 30), st.integers(1, 9)),
)
def test_a_look_up_covers_what_objects_have_with_few(
    runs: np.ndarray, most: int, objects: dict[int, int]
) -> None:
    names = [str(at) for at in range(len(runs))]
    lookup = PackLookup(names, runs, lambda of, at: (of + at) % 7 == 0)
    order = lookup.order(most)
    assert sorted(order) == list(range(len(runs)))
    expected: dict[int, set[int]] = {}
    for at in order:
        if at in objects:
            lookup.found(at, objects[at])
            for block in range(max(0, at - objects[at] + 1), at + 1):
                if runs[block] == runs[at] and (at + block) % 7:
                    expected.setdefault(block, set()).add(at)
    for at in range(len(runs)):
        before = [block for block in range(max(0, at - 15), at + 1) if runs[block] == runs[at]]
        assert lookup.is_answered(at) == all(block in expected for block in before)
    chosen = {}
    for each in lookup.objects():
        for at, behind in zip(each.positions, each.behind, strict=True):
            assert at not in chosen
            chosen[at] = int(each.name)
            assert chosen[at] - at == behind < each.num_blocks == objects[chosen[at]]
    assert set(chosen) == set(expected)
    assert all(of in expected[at] for at, of in chosen.items())


def test_names_where_packs_would_end_are_asked_for_first() -> None:
    lookup = PackLookup(
        [str(at) for at in range(7)], np.array([0, 0, 0, 0, 0, 1, 1]), lambda *_: False
    )
    assert lookup.order(2) == [1, 3, 4, 6, 5, 2, 0]
    lookup.found(3, 4)
    assert [lookup.is_answered(at) for at in range(7)] == [True] * 4 + [False] * 3


@given(
    length=st.integers(1, 20),
    most=st.integers(1, 9),
    objects=st.dictionaries(st.integers(0, 19), st.integers(1, 9)),
)
@example(length=5, most=8, objects={1: 2, 4: 4})
def test_what_any_object_has_is_found(length: int, most: int, objects: dict[int, int]) -> None:
    """Also in one whose own name lies in the midst of another that goes back less far."""
    store = PackedStore()
    chain = Keys.from_bytes(chain_of([0] * length))
    for at, count in objects.items():
        if at < length:
            store.put(chain[max(0, at - count + 1) : at + 1], most=9)
    is_there = np.zeros(length, dtype=bool)
    for at, count in objects.items():
        is_there[max(0, at - count + 1) : at + 1] |= at < length
    assert store.found(chain, np.zeros(length, dtype=np.int64), most) == is_there.tolist()


def test_a_read_takes_each_object_once_and_forgets_the_oldest() -> None:
    names = list("abcdef")
    where = ObjectIndex(capacity=4)
    objects = pack_objects(names, np.zeros(6, dtype=np.int64), 3)
    for each in objects:
        where.note(each, names)
    found = where.objects_of(names)
    assert [(each.name, list(each.positions)) for each in found] == [
        ("a", [0]),
        ("b", [1]),
        ("c", [2]),
        ("f", [3, 4, 5]),
    ]
    where.drop("e")
    assert [each.name for each in where.objects_of(["d", "e"])] == ["f", "e"]


@pytest.mark.parametrize(("size", "most"), [(OBJECT, 16), (1 << 20, 8), (9 << 20, 1)])
def test_no_object_is_taken_for_ours_that_is_larger_than_any(size: int, most: int) -> None:
    assert most_in_one(size) == most
