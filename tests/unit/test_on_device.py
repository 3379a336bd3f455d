"""Hints with lazy stores: blocks are stored long after the request that computed them has ended.

One-line breaks that were tried; each made a test of this module fail.

- ``Stores.offered`` does not ask ``may_store``; reserves for nobody
- ``OnDevice.ended`` allows nothing; withholds what others had before; forgets the live ones
- ``OnDevice`` drops nothing when it is full
- ``Hints.after`` gives back the hints as they are
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.desk import Desk, story

from kvferry.core.keys import Keys
from kvferry.hints import Hints


def lazy(**settings: object) -> Desk:
    return Desk(store_mode="lazy", **settings)  # type: ignore[arg-type]


def live(desk: Desk, name: str, keys: Keys, computed: int = 0, **hints: object) -> None:
    """It is opened, looked up and runs."""
    said = Hints.read(hints) if hints else None
    request = desk.scheduler.open(name, keys, said)
    desk.scheduler.named[name] = request
    request.match(computed_tokens=computed)
    request.run()


def life(desk: Desk, name: str, keys: Keys, computed: int = 0, **hints: object) -> None:
    live(desk, name, keys, computed, **hints)
    desk.scheduler.finish(name)


def stored(desk: Desk, keys: Keys) -> int:
    """Offer all of it, its end first as engines do; how many leading blocks can be had then."""
    backwards = np.arange(len(keys))[::-1]
    desk.offer(0, keys.take(backwards), backwards.tolist())
    desk.run()
    return desk.pool.match(keys)


def test_what_is_not_to_be_stored_is_not_stored_when_it_is_offered() -> None:
    desk = lazy()
    life(desk, "a", story(1, 4), do_not_store=True)
    assert stored(desk, story(1, 4)) == 0
    assert desk.pool.counts.free == 16
    life(desk, "b", story(2, 4), max_store_tokens=10)  # two whole blocks
    assert stored(desk, story(2, 4)) == 2
    life(desk, "c", story(3, 4))
    assert stored(desk, story(3, 4)) == 4
    desk.check_empty()


def test_it_holds_while_the_request_still_runs_and_after_a_preemption() -> None:
    """A window gives up blocks of a running request, a preemption all of them."""
    desk = lazy()
    live(desk, "a", story(1, 4), do_not_store=True)
    assert stored(desk, story(1, 4)) == 0
    request = desk.scheduler.named["a"]
    request.chain = story(1, 4) + story(2, 2)  # it has grown
    assert stored(desk, story(1, 4) + story(2, 2)) == 0
    desk.scheduler.preempt("a")
    assert stored(desk, story(1, 4)) == 0
    request.match(computed_tokens=16)  # its own blocks are on the device still
    request.run()
    desk.scheduler.finish("a")
    assert stored(desk, story(1, 4) + story(2, 2)) == 0
    desk.check_empty()


def test_what_others_may_store_is_stored() -> None:
    desk = lazy()
    shared, own = story(1, 2), story(1, 2) + story(2, 2)
    life(desk, "before", shared)
    life(desk, "a", own, computed=8, do_not_store=True)
    assert stored(desk, own) == 2, "what another had computed before is that one's"
    second = story(3, 4)
    life(desk, "b", second, do_not_store=True)
    life(desk, "after", second[:3], computed=12)
    assert stored(desk, second) == 3, "another asked for it, and said nothing"
    third = story(4, 4)
    life(desk, "c", third, do_not_store=True)
    life(desk, "d", third, computed=16, max_store_tokens=8)
    assert stored(desk, third) == 2
    desk.check_empty()


def test_what_is_stored_late_is_kept_as_long_as_was_said_of_it() -> None:
    desk = lazy()
    life(desk, "a", story(1, 3), pin_seconds=60)
    life(desk, "b", story(2, 3), pin_seconds=5)
    desk.now += 20
    assert stored(desk, story(1, 3)) == 3
    assert stored(desk, story(2, 3)) == 3
    slots = desk.pool.lookup(story(1, 3))
    assert desk.pool.eviction.pins.until(slots).tolist() == [60.0] * 3
    assert not desk.pool.eviction.pins.pinned(desk.pool.lookup(story(2, 3))).any(), (
        "its time was up"
    )
    entry = desk.scheduler.journal("a")
    assert entry is not None
    assert entry.hints == Hints(pin_seconds=60.0)


def test_a_tenants_blocks_count_for_it_when_they_are_stored_late() -> None:
    desk = lazy(tenants="a=25%:25%, b=50%")
    life(desk, "x", story(1, 8), tenant="a")
    life(desk, "y", story(2, 8), tenant="b")
    assert stored(desk, story(1, 8)) == 4  # its ceiling
    assert stored(desk, story(2, 8)) == 8
    slots = {name: counts.slots["host"] for name, counts in desk.scheduler.stats().tenants.items()}
    assert slots["a"] == 4
    assert slots["b"] == 8
    assert slots["none"] == 0


def test_what_is_remembered_is_bounded_and_the_latest() -> None:
    desk = lazy(blocks=4, max_storing_blocks=8)  # 1024 keys are remembered at least
    for number in range(1, 700):
        life(desk, f"r{number}", story(number, 2), do_not_store=True, pin_seconds=1)
    remembered = desk.scheduler.stores.on_device
    assert remembered is not None
    assert len(remembered) <= 2 * 1024
    assert stored(desk, story(699, 2)) == 0
    assert stored(desk, story(1, 2)) == 2, "the device has dropped it long ago"


@pytest.mark.parametrize(
    ("hints", "seconds", "left"),
    [
        (Hints(pin_seconds=10), 4, Hints(pin_seconds=6)),
        (Hints(pin_seconds=10), 10, Hints()),
        (Hints(continues=True, within=10), 4, Hints(continues=True, within=6)),
        (Hints(continues=True, within=10), 11, Hints()),
        (Hints(continues=True), 1e9, Hints(continues=True)),
        (Hints(ended=True), 5, Hints(ended=True)),
        (Hints(pin_seconds=10, tenant="a"), 0, Hints(pin_seconds=10, tenant="a")),
    ],
)
def test_times_that_have_passed_are_over(hints: Hints, seconds: float, left: Hints) -> None:
    assert hints.after(seconds) == left
