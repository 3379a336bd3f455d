"""Copies of the staged path go to two streams in turn, and end as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import Rig

from kvferry.device.driver.base import Priority
from kvferry.device.job import Direction
from kvferry.device.paths.host_runs import HostRuns
from kvferry.device.paths.ring import Ring
from kvferry.device.paths.turns import Turns

COUNT = 24


@pytest.fixture
def staged() -> Iterator[tuple[Rig, Ring]]:
    kv = make_kv("split", page=512, num_blocks=COUNT, seed=3)
    rig = Rig(kv, path="staged", num_slots=COUNT, seed=3)
    rig.store([0], [0])
    rig.drain_ok()
    yield rig, rig.engine._paths["staged"]._ring  # type: ignore[attr-defined]
    rig.driver.timeline.frozen = set()
    rig.drain()
    rig.close()


def streams_of_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams of all chunks, as they are queued from now on."""
    found: list[int] = []
    for verb in ("load", "store"):
        real = getattr(HostRuns, verb)

        def noted(*args: object, real: Callable[..., None] = real) -> None:
            found.append(args[-1])  # type: ignore[arg-type]
            real(*args)

        monkeypatch.setattr(HostRuns, verb, noted)
    return found


def test_no_two_copies_of_a_job_follow_each_other_on_one_stream(
    staged: tuple[Rig, Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they do, a copy engine has no reason to look for anybody else's."""
    rig, ring = staged
    found = streams_of_chunks(monkeypatch)
    everything = list(range(COUNT))
    rig.load(everything, everything)
    rig.drain_ok()
    loads = found.copy()
    found.clear()
    rig.store(everything, everything)
    rig.drain_ok()
    own = rig.stream(Direction.STORE)
    assert len(loads) > 3
    assert len(found) > 3
    assert set(loads) == set(ring.inbound.streams)
    assert set(found) == {own, ring.outbound}
    assert all(a != b for a, b in itertools.pairwise(loads))
    assert all(a != b for a, b in itertools.pairwise(found[:-1]))
    assert found[-1] == own


@pytest.mark.parametrize("number", [0, 1])
def test_a_load_is_over_when_the_copies_on_both_streams_are(
    staged: tuple[Rig, Ring], number: int
) -> None:
    rig, ring = staged
    everything = list(range(COUNT))
    rig.driver.timeline.frozen = {ring.inbound.streams[number]}
    rig.load(everything, everything)
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    assert rig.engine.poll() == []
    rig.driver.timeline.frozen = set()
    rig.drain_ok()
    assert [rig.kv.block(at) for at in everything] == [rig.slot(at) for at in everything]


def test_a_store_is_over_when_the_copies_on_both_streams_are(staged: tuple[Rig, Ring]) -> None:
    """Its end is looked for on one of them."""
    rig, ring = staged
    everything = list(range(COUNT))
    rig.host[everything] = 0xEE
    rig.driver.timeline.frozen = {ring.outbound}
    rig.store(everything, everything)
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    assert rig.engine.poll() == []
    rig.driver.timeline.frozen = set()
    rig.drain_ok()
    assert [rig.slot(at) for at in everything] == [rig.kv.block(at) for at in everything]


def test_what_is_over_is_not_waited_for() -> None:
    driver = FakeDriver()
    with driver.current():
        streams = (driver.create_stream(Priority.HIGH), driver.create_stream(Priority.HIGH))
        turns = Turns(driver, streams)
        event = driver.create_event(timing=False)
        assert turns.take() == streams[0]
        driver.record_event(event, streams[0])
        turns.end(event)
        driver.timeline.run_all()
        driver.fail("stream_wait_event")
        assert turns.take() == streams[1]
        turns.end(event)
        assert turns.take(is_last=True) == streams[0]
