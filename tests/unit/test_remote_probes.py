"""A store that is asked now and then whether it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault, Fetched, Staging, Unavailable
from kvferry.tiers.remote.health import Bandwidth, StoreHealth
from kvferry.tiers.remote.objects import ObjectFormat, open_sealer

OBJECTS = ObjectFormat(bytes(32), 64)
NO = Fault("no")
NOT_GIVEN_BACK = "a block that it was given it does not give back"


class Shelf:
    """A client whose probes end as they are told to. Owns its objects."""

    num_calls = 1

    def __init__(self, *probes: Exception | Fault | None) -> None:
        self.probes = list(probes)
        self.staging = Staging(OBJECTS.object_bytes, 2)
        self.objects: dict[str, bytes] = {}
        self.says: dict[str, Unavailable | Fault] = {}  # instead of doing it

    async def probe(self, way: Way) -> Fault | None:
        answer = self.probes.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        if "put" not in self.says:
            self.objects[names[0]] = bytes(objects[0])
        self.staging.give_back(objects[0])
        return [self.says.get("put")]

    async def find(self, names: Sequence[str], size: int) -> list[int | Unavailable | Fault]:
        return [self.says.get("find") or (1 if names[0] in self.objects else Unavailable())]

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview]
    ) -> list[Fetched]:
        if "get" in self.says:
            return [self.says["get"]]
        (room,) = self.staging.lend(1)
        room[:] = self.objects[names[0]]
        return [room]


def told_after_all_probes(shelf: Shelf, num_free: int = 2, way: Way = Way.READ) -> list[str]:
    """What was said of this way, after as many probes of it as the shelf has answers for."""
    told: list[str] = []

    def report(of: Way, ailment: str) -> None:
        if of is way:
            told.append(ailment)

    health = StoreHealth(cast(Any, shelf), OBJECTS, open_sealer(OBJECTS), Bandwidth(None), report)

    async def all_probes() -> None:
        while shelf.probes:
            await health.probe(way, 60.0)

    asyncio.run(all_probes())
    assert len(shelf.staging.lend(num_free)) == num_free, "every room is given back"
    return told


@pytest.mark.parametrize(
    ("probes", "says", "told"),
    [
        # Seen red with probes that may raise: the store was never asked again.
        (
            [UnicodeError("label empty"), Fault("away"), None],
            {},
            ["UnicodeError: label empty", "away", ""],
        ),
        # Seen red where a small object was enough.
        ([Fault("away"), None], {"find": NO}, ["away", "no"]),
        ([Fault("away"), None], {"get": NO}, ["away", "no"]),
        ([Fault("away"), None], {"find": Unavailable()}, ["away", NOT_GIVEN_BACK]),
        ([Fault("away"), None], {"get": Unavailable()}, ["away", NOT_GIVEN_BACK]),
        # Seen red where one circuit breaker stood for both ways.
        ([Fault("away"), None], {"put": NO}, ["away", ""]),
        ([None], {}, []),
    ],
)
def test_a_store_can_be_read_once_a_block_came_back_from_it(
    probes: list[Any], says: dict[str, Any], told: list[str]
) -> None:
    shelf = Shelf(*probes)
    shelf.says = says
    assert told_after_all_probes(shelf) == told
    assert bool(told) or not shelf.objects, "a store that is well from the start gets no block"


def test_a_store_that_takes_no_blocks_is_not_written_to() -> None:
    shelf = Shelf(Fault("away"), None)
    shelf.says["put"] = NO
    assert told_after_all_probes(shelf, way=Way.WRITE) == ["away", "no"]


def test_one_is_not_away_because_calls_that_hung_have_all_rooms() -> None:
    """Seen red where it was: S3 was left alone for a minute after it was well again."""
    shelf = Shelf(Fault("away"), None)
    shelf.staging.lend(2)
    assert told_after_all_probes(shelf, num_free=0) == ["away", ""]
