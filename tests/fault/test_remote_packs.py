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


@pytest.mark.parametrize("kind", ["rclone"])
def test_blocks_that_do_not_follow_each_other_are_objects_of_their_own(fleet: Fleet) -> None:
    ours = fleet.join(8)
    ours.write([0, 2, 3, 5])
    assert fleet.objects() == {0: 1, 3: 2, 5: 1}
    ours.is_chain = False
    ours.write([6, 7])
    assert fleet.objects() == {0: 1, 3: 2, 5: 1, 6: 1, 7: 1}


@pytest.mark.parametrize("kind", ["rclone"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 8), (8, 1), (2, 4)])
def test_any_setting_reads_what_any_other_wrote(fleet: Fleet, ours: int, theirs: int) -> None:
    writer = fleet.join(ours)
    writer.write([0, 1, 2, 3, 4])
    reader = fleet.join(theirs, like=writer)
    assert found(reader, ALL) == [0, 1, 2, 3, 4]
    assert read(reader, [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]


@every_server
def test_a_chain_that_leaves_a_pack_in_its_midst_finds_what_comes_before(fleet: Fleet) -> None:
    ours = fleet.join(4)
    ours.write(ALL)
    theirs = fleet.join(4, like=ours)
    assert found(theirs, [0, 1, 2, 3, 4, 5]) == [0, 1, 2, 3], "the name of 4 to 7 is 7's"
    theirs.write([4, 5])
    assert found(theirs, [0, 1, 2, 3, 4, 5]) == [0, 1, 2, 3, 4, 5]
    assert read(theirs, ALL[:6]) == ALL[:6]
    assert found(ours, ALL) == ALL


@pytest.mark.parametrize("kind", ["moto"])
@pytest.mark.parametrize("pack", [None, 1, 16])
def test_a_lookup_says_how_long_objects_may_be(fleet: Fleet, pack: int | None) -> None:
    """Whatever our own setting is: others may write longer ones."""
    tier = fleet.join(pack).tier
    host = HostTier(1, SIZE)
    assert TierMover(host, tier).most_in_one == 16


@pytest.mark.parametrize("kind", ["moto"])
def test_each_rank_has_packs_of_its_own(fleet: Fleet) -> None:
    ranks = [fleet.join(4, rank=rank, num_ranks=2) for rank in range(2)]
    ranks[0].write([0, 1, 2, 3])
    assert found(ranks[1], ALL) == []
    ranks[1].write([1, 2, 3])
    assert found(ranks[0], ALL) == [0, 1, 2, 3]
    assert found(ranks[1], ALL) == [1, 2, 3]
    for rank, numbers in zip(ranks, ([0, 1, 2, 3], [1, 2, 3]), strict=True):
        assert read(rank, numbers) == numbers


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


@every_server
def test_the_longer_of_two_objects_of_one_name_holds_both(fleet: Fleet) -> None:
    short, long = fleet.join(8), fleet.join(8)
    long.rows[:] = short.rows
    short.write([5, 6, 7])
    theirs = fleet.join(like=long)
    assert found(theirs, ALL) == [5, 6, 7]
    long.write(ALL)
    assert fleet.objects() == {7: 8}, "what was there had fewer blocks"
    assert read(theirs, [5, 6, 7]) == [5, 6, 7], "they lie elsewhere in it now"
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL


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


@every_server
def test_a_pack_whose_last_block_is_damaged_is_replaced(fleet: Fleet) -> None:
    ours = fleet.join(8)
    ours.write(ALL)
    theirs = fleet.join(8, like=ours)
    fleet.damage(ours, 7, -1)
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL[:7]
    assert found(theirs, ALL) == ALL[:7]
    theirs.write(ALL)
    assert read(theirs, ALL) == ALL


@pytest.mark.parametrize("kind", ["moto"])
def test_a_shorter_pack_that_lacks_the_damaged_block_leaves_the_longer(fleet: Fleet) -> None:
    """Where the server minds the condition: else it may be overwritten whatever we ask."""
    ours = fleet.join(8)
    ours.write(ALL)
    theirs = fleet.join(8, like=ours)
    fleet.damage(ours, 7, 2 * OBJECT + 17)
    good = [0, 1, 3, 4, 5, 6, 7]
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == good
    theirs.write([5, 6, 7])
    assert fleet.objects() == {7: 8}, "its good blocks would be lost for nothing"
    assert found(theirs, ALL) == good, "the bad one is bad still"
    assert read(theirs, good) == good
    theirs.write([2, 3, 4, 5, 6, 7])
    assert fleet.objects() == {7: 6}, "this one brings it"
    assert found(theirs, ALL) == ALL[2:]
    assert read(theirs, ALL[2:]) == ALL[2:]
    theirs.write([0, 1])
    assert found(theirs, ALL) == ALL
    assert read(theirs, ALL) == ALL


@pytest.mark.parametrize("kind", ["rclone"])
@pytest.mark.parametrize(
    ("cut_to", "says"),
    [(8 * OBJECT - 1, []), (5 * OBJECT, [3, 4, 5, 6, 7]), (0, []), (17 * OBJECT, [])],
    ids=["torn", "of whole blocks", "empty", "too long"],
)
def test_a_pack_of_another_length_misses_what_it_lacks(
    fleet: Fleet, cut_to: int, says: list[int]
) -> None:
    ours = fleet.join(8)
    ours.write(ALL)
    theirs = fleet.join(8, like=ours)
    path = fleet.path(ours, 7)
    assert found(theirs, ALL) == ALL
    content = bytes(obstore.get(fleet.bucket, path).bytes())
    obstore.put(fleet.bucket, path, (content * 3)[:cut_to])
    assert read(theirs, ALL) == [], "what is there proves nothing of itself"
    assert (theirs.into == 0xEE).all()
    assert found(fleet.join(8), ALL) == says, "by its length"
    assert found(theirs, ALL) == [], "who has read it knows better"
    assert not theirs.tier.ailment
    theirs.write(ALL)
    assert read(theirs, ALL) == ALL


@every_server
def test_a_pack_that_is_gone_since_it_was_found_is_missed(fleet: Fleet) -> None:
    ours = fleet.join(4)
    ours.write(ALL)
    theirs = fleet.join(4, like=ours)
    assert found(theirs, ALL) == ALL
    obstore.delete(fleet.bucket, fleet.path(ours, 3))
    assert read(theirs, ALL) == [4, 5, 6, 7]
    assert found(theirs, ALL) == [4, 5, 6, 7]


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
