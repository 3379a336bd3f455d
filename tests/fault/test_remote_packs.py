"""Several blocks in one object of a shared store: what is asked for, found and read, and bad days.

Against both real servers: one honours conditional puts, the other ignores them, and ranges too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator

import obstore
import pytest
from tests.fakes import remote, s3_servers
from tests.fakes.crafted_keys import keys
from tests.fakes.remote import SIZE, Store, environment

from kvferry.hostmem.slots import HostTier
from kvferry.tiers.contract import Way
from kvferry.tiers.movers import TierMover
from kvferry.tiers.remote.objects import SEAL_BYTES
from kvferry.tiers.remote.tier import RemoteTier

every_server = pytest.mark.parametrize("kind", s3_servers.SERVERS)
OBJECT = SIZE + SEAL_BYTES
ALL = list(range(8))


class Fleet:
    """Servers that share one namespace: what one writes, the others find. Owns their tiers."""

    def __init__(self, kind: str) -> None:
        self.namespace = secrets.token_bytes(32)
        self.kind = kind
        self.bucket = remote.bucket(kind)
        self._tiers: list[RemoteTier] = []

    def join(
        self,
        pack: int | None = None,
        *,
        endpoint: str = "",
        like: Store | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Store:
        """A server with a process of its own; its blocks have the bytes of the other's."""
        endpoint = endpoint or s3_servers.server(self.kind).endpoint
        self._tiers.append(
            remote.open_s3(
                endpoint, SIZE, namespace=self.namespace, pack=pack, rank=rank, num_ranks=num_ranks
            )
        )
        store = Store(self._tiers[-1], self.namespace)
        store.is_chain = True
        if like is not None:
            store.rows[:] = like.rows
        return store

    def objects(self) -> dict[int, int]:
        """The blocks that objects are named by, and how many blocks each has."""
        folder = f"tests/kvferry-2/{self.namespace.hex()}"
        there = [each for page in obstore.list(self.bucket, prefix=folder) for each in page]
        sizes = {each["path"].rpartition("/")[2]: each["size"] for each in there}
        names = {bytes(key).hex(): number for number, key in enumerate(keys(ALL))}
        return {names[name]: size // OBJECT for name, size in sizes.items() if name in names}

    def path(self, store: Store, number: int) -> str:
        return f"tests/{store.objects.names(keys([number]))[0]}"

    def damage(self, store: Store, number: int, *places: int) -> None:
        """Turn a bit at these places of the object with this block's name."""
        path = self.path(store, number)
        content = bytearray(obstore.get(self.bucket, path).bytes())
        for at in places:
            content[at] ^= 1
        obstore.put(self.bucket, path, bytes(content))

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


@pytest.fixture
def fleet(kind: str) -> Iterator[Fleet]:
    made = Fleet(kind)
    yield made
    made.close()


def found(store: Store, numbers: list[int]) -> list[int]:
    result = store.do(Way.FIND, numbers)
    return [number for number, ok in zip(numbers, result.ok, strict=True) if ok]


def read(store: Store, numbers: list[int]) -> list[int]:
    """Those that come, and come right."""
    ok = store.reads(numbers)
    return [number for number, came in zip(numbers, ok, strict=True) if came]


@every_server
def test_a_chain_goes_into_few_objects_and_another_server_reads_them(fleet: Fleet) -> None:
    ours = fleet.join(3)
    ours.write(ALL)
    assert fleet.objects() == {2: 3, 5: 3, 7: 2}
    theirs = fleet.join(like=ours)
    assert read(theirs, ALL) == [2, 5, 7], "unasked, a block is looked for under its own name"
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL
    assert read(theirs, [3]) == [3], "one of a pack"
    assert read(theirs, [7, 0, 4, 1]) == [7, 0, 4, 1]


@pytest.mark.parametrize("kind", ["moto"])
@pytest.mark.parametrize("pack", [None, 1, 16])
def test_a_lookup_says_how_long_objects_may_be(fleet: Fleet, pack: int | None) -> None:
    """Whatever our own setting is: others may write longer ones."""
    tier = fleet.join(pack).tier
    host = HostTier(1, SIZE)
    assert TierMover(host, tier).most_in_one == 16


@every_server
def test_what_is_forgotten_is_removed_with_its_packs(fleet: Fleet) -> None:
    ours = fleet.join(4)
    ours.tier.forget()
    ours.write(ALL)
    assert fleet.objects() == {3: 4, 7: 4}
    ours.tier.forget()
    ours.wait(lambda: not fleet.objects())
    assert read(ours, ALL) == []
    assert found(ours, ALL) == []


@pytest.mark.parametrize("kind", ["moto"])
def test_encrypted_blocks_are_packed_and_proven_one_by_one(fleet: Fleet) -> None:
    with environment({"KVFERRY_REMOTE_KEY": "a2V5" * 10 + "a2U="}):
        ours = fleet.join(8)
        theirs = fleet.join(like=ours)
    ours.write(ALL)
    assert fleet.objects() == {}, "names are digests"
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL
    assert found(fleet.join(8), ALL) == []


def test_a_shorter_object_leaves_a_longer_where_the_server_minds_the_condition() -> None:
    fleet = Fleet("moto")
    long = fleet.join(8)
    long.write(ALL)
    short = fleet.join(8, like=long)
    short.write([5, 6, 7])
    assert fleet.objects() == {7: 8}
    fleet.close()


def test_where_it_does_not_what_the_shorter_lacks_is_missed_and_written_again() -> None:
    fleet = Fleet("rclone")
    long = fleet.join(8)
    long.write(ALL)
    theirs = fleet.join(8, like=long)
    assert found(theirs, ALL) == ALL
    fleet.join(8, like=long).write([5, 6, 7])
    assert fleet.objects() == {7: 3}
    assert read(theirs, ALL) == [5, 6, 7], "it found more, and misses them"
    assert found(theirs, ALL) == [5, 6, 7]
    theirs.write([0, 1, 2, 3, 4])
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL
    fleet.close()


@every_server
def test_racing_writers_of_overlapping_packs_do_no_harm(fleet: Fleet) -> None:
    first = fleet.join(4)
    others = [fleet.join(pack, like=first) for pack in (1, 2, 3, 8)]
    racing = [threading.Thread(target=each.write, args=(ALL,)) for each in (first, *others)]
    for each in racing:
        each.start()
    for each in racing:
        each.join()
    theirs = fleet.join(like=first)
    there = found(theirs, ALL)
    assert read(theirs, there) == there
    assert there[-1] == 7, "the last has a name that all of them gave"


@every_server
def test_a_damaged_block_is_missed_alone_and_written_again(fleet: Fleet) -> None:
    ours = fleet.join(8)
    ours.write(ALL)
    theirs = fleet.join(8, like=ours)
    fleet.damage(ours, 7, 2 * OBJECT + 17, 6 * OBJECT - 1)  # the last in block 5's seal
    assert found(theirs, ALL) == ALL
    good = [0, 1, 3, 4, 6, 7]
    assert read(theirs, ALL) == good
    assert not theirs.tier.ailment
    assert found(theirs, ALL) == good, "nobody is told of them again"
    theirs.write([2])
    theirs.write([5])
    assert fleet.objects() == {2: 1, 5: 1, 7: 8}, "the others' object stays"
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL


@pytest.fixture
def door(kind: str) -> Iterator[s3_servers.Door]:
    made = s3_servers.Door(s3_servers.server(kind))
    yield made
    made.fault = None
    made.close()


def counting(door: s3_servers.Door) -> Callable[[], dict[Way, int]]:
    """From now on; each call tells of those since the last."""
    asked: list[Way] = []
    door.fault = lambda way, _: asked.append(way)

    def since() -> dict[Way, int]:
        counts = {way: asked.count(way) for way in Way if way in asked}
        asked.clear()
        return counts

    return since


@every_server
def test_packs_cost_fewer_requests_and_look_ups_no_more(
    fleet: Fleet, door: s3_servers.Door
) -> None:
    ours = fleet.join(4, endpoint=door.endpoint)
    since = counting(door)
    ours.write(ALL)
    assert since() == {Way.WRITE: 2}
    theirs = fleet.join(4, endpoint=door.endpoint, like=ours)
    since()
    assert found(theirs, [n + 100 for n in ALL]) == []
    assert since() == {Way.FIND: 8}, "as many as blocks, no more"
    assert found(theirs, ALL) == ALL
    assert since()[Way.FIND] <= 8
    assert read(theirs, ALL) == ALL
    assert since() == {Way.READ: 2}
    assert read(theirs, [4, 5, 6]) == [4, 5, 6]
    assert since() == {Way.READ: 1}, "all of the pack, once"
