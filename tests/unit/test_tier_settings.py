"""Tiers as settings name them: read, refused with what to do, opened, held to the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from tests.fakes import tiers as fakes
from tests.fakes.crafted_keys import keys

from kvferry.config import Config, show
from kvferry.core.quantities import MiB
from kvferry.errors import ClosedError, ConfigError
from kvferry.hostmem.slots import HostTier
from kvferry.tiers.contract import Batch, BatchId, TierSetup, Way
from kvferry.tiers.memory import MemoryTier
from kvferry.tiers.movers import TierMover, open_tier, open_tiers
from kvferry.types import Rank, TierName

MINE = "tests.fakes.tiers:open_mine"


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    fakes.opened.clear()
    yield
    fakes.opened.clear()


def tiers(value: object) -> list[tuple[str, str, str]]:
    config = Config.from_dict({"tiers": value})
    return [(tier.name, tier.kind, tier.options) for tier in config.tiers]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, []),
        ("none", []),
        ([], []),
        ("memory:2GiB", [("memory", "memory", "2GiB")]),
        (" Memory : 2048 MiB ", [("memory", "memory", "2GiB")]),
        ("near=memory:1MiB", [("near", "memory", "1MiB")]),
        (
            "memory:1MiB, memory-by-key:3MiB",
            [("memory", "memory", "1MiB"), ("memory-by-key", "memory-by-key", "3MiB")],
        ),
        (
            ["near=memory:1MiB", "far=memory:2MiB"],
            [("near", "memory", "1MiB"), ("far", "memory", "2MiB")],
        ),
        ("a.store:open_it", [("store", "a.store:open_it", "")]),
        ("store:open_it:/mnt/x?a=b", [("store", "store:open_it", "/mnt/x?a=b")]),
        (["far=a.b.store:open_it:x, y"], [("far", "a.b.store:open_it", "x, y")]),
    ],
)
def test_tiers_are_read_nearest_first(given, read):
    assert tiers(given) == read


@pytest.mark.parametrize("text", ["none", "memory:2GiB", "near=memory:3MiB, a.store:open_it:x"])
def test_what_is_shown_reads_back(text):
    config = Config.from_dict({"tiers": text})
    assert show("tiers", config.tiers) == text
    assert Config.from_dict({"tiers": show("tiers", config.tiers)}) == config
    assert dataclasses.replace(config, host=5 * MiB).tiers == config.tiers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "expected tiers such as memory:2GiB"),
        ([3], "expected a tier such as memory:2GiB"),
        ("memory", "tiers: memory: expected a size"),
        ("memory:2G", "write GiB or GB"),
        ("memory:none", "expected a size"),
        ("memory:0", "at least 1 bytes"),
        ("memry:2GiB", "did you mean 'memory'?"),
        ("disk:/x", "kinds: memory:SIZE, memory-by-key:SIZE; or a factory of your own"),
        ("", None),
        ("memory:1MiB,", "there is no kind of tier ''"),
        ("memory:1MiB, memory:2MiB", "2 tiers are called memory; give them names"),
        ("host=memory:1MiB", "cannot be called 'host'"),
        ("device=memory:1MiB", "cannot be called 'device'"),
        ("Näh=memory:1MiB", "cannot be called"),
        ("9=memory:1MiB", "cannot be called"),
        ("\x1b[31m=memory:1MiB", "cannot be called"),
        (",".join(f"m{n}=memory:1MiB" for n in range(9)), "at most 8 can be given, got 9"),
        ("a" * 5000, "there is no kind of tier"),
    ],
)
def test_malformed_tiers_are_refused_with_a_remedy(given, words):
    if words is None:
        assert tiers(given) == []
        return
    with pytest.raises(ConfigError) as refused:
        tiers(given)
    assert words in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def opening(text: str, host: HostTier) -> dict[TierName, TierMover]:
    specs = Config.from_dict({"tiers": text}).tiers
    return dict(open_tiers(specs, host, TierSetup(TierName(""), 4096, Rank(1), 3)))


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier(4, 4096)
    yield tier
    tier.close()


def test_tiers_are_opened_for_the_host_slots(host):
    found = opening(f"memory:64KiB, memory-by-key:64KiB, far={MINE}:7", host)
    assert list(found) == ["memory", "memory-by-key", "far"]
    assert [tier.num_places for tier in found.values()] == [16, None, 7]
    ((setup, _),) = fakes.opened
    assert setup == TierSetup(TierName("far"), 4096, Rank(1), 3, "7")
    for tier in found.values():
        tier.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory:1KiB", "hold no block of 4096 bytes"),
        ("no_such_package.store:open_it", "no_such_package.store cannot be imported"),
        ("tests.fakes.tiers:open_no", "tests.fakes.tiers has no factory open_no"),
        ("tests.fakes.tiers:NO_FACTORY", "has no factory NO_FACTORY that can be called"),
        ("tests.fakes.tiers:open_never", "cannot be opened: OSError: the cupboard is locked"),
        ("tests.fakes.tiers:open_nothing", "gave object, which is no tier for tiers: it lacks"),
        ("tests.fakes.tiers:open_with_other_blocks", "block_bytes is 4097, it was asked for 4096"),
        ("tests.fakes.tiers:open_under_another_name", "name is 'memory', it was asked for 'tiers'"),
        (f"{MINE}:many", "cannot be opened: ValueError"),
        (f"{MINE}:0", "needs a positive number"),
    ],
)
def test_one_that_cannot_be_opened_is_named_and_the_others_are_closed(host, text, words):
    with pytest.raises(ConfigError) as refused:
        opening(f"first={MINE}, {text}", host)
    assert words in str(refused.value)
    assert str(refused.value).startswith("tiers: ")
    for _, tier in fakes.opened:
        with pytest.raises(ClosedError):
            tier.submit(_batch(tier))


def _batch(tier: MemoryTier) -> Batch:
    size = np.array([tier.block_bytes])
    address, place = np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Batch(BatchId(1), Way.WRITE, keys([1]), 1e12, address, size, place)


def test_a_store_by_key_is_bounded_what_came_first_goes_first(host):
    (spec,) = Config.from_dict({"tiers": "memory-by-key:8KiB"}).tiers
    tier = open_tier(spec, TierSetup(spec.name, 4096, options=spec.options))
    addresses = np.array([[host.address]] * 3)
    some = keys([1, 2, 3])
    tier.submit(Batch(BatchId(1), Way.WRITE, some, 1e12, addresses, np.array([4096])))
    assert tier.drain()[0].ok.all()
    tier.submit(Batch(BatchId(2), Way.FIND, some, 1e12))
    assert tier.drain()[0].ok.tolist() == [False, True, True]
    tier.close()
