"""What goes to disk at all: blocks asked for again, and so many bytes a day."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk, story

from kvferry.config import Config
from kvferry.pool import Pool
from kvferry.scheduler.gate import Gate, WriteBudget, gate_of
from kvferry.scheduler.level import PlacedLevel, WriteMode
from kvferry.types import TierName

DISK = TierName("disk")
DAY = 86400.0


def test_no_day_sees_more_than_its_bytes() -> None:
    """However it is spent: at once, bit by bit, after a rest."""
    for pause in (1.0, 600.0, DAY / 3, 2 * DAY):
        budget, now = WriteBudget(80_000, 0.0), 0.0
        spent: list[tuple[float, int]] = []
        while now < 3 * DAY:
            num_bytes = budget.left(now)
            budget.spend(num_bytes)
            spent.append((now, num_bytes))
            now += pause if len(spent) % 50 else 40_000.0
        for at, _ in spent[::7]:
            within = sum(count for then, count in spent if at <= then < at + DAY)
            assert within <= 80_000


def test_a_budget_is_no_wall() -> None:
    budget = WriteBudget(80_000, 0.0)
    assert budget.left(0.0) == 10_000
    budget.spend(10_000)
    assert budget.left(0.0) == 0
    assert budget.left(DAY / 14) == pytest.approx(5_000, abs=2)
    assert budget.left(5 * DAY) == 10_000


def test_a_gate_lets_through_what_it_should() -> None:
    gate = Gate(times=2, num_keys=100, bytes_per_day=8 * 30, block_bytes=10)
    some = keys(range(6))
    assert not gate.lets(some, 0.0).any()
    gate.see(some)
    gate.see(some[1:])
    assert gate.lets(some, 0.0).tolist() == [False, True, True, True, False, False], "30 bytes"
    gate.wrote(3)
    assert not gate.lets(some, 0.0).any()
    assert gate.lets(some, DAY / 7).sum() == 3


def test_the_settings_make_one_where_it_matters() -> None:
    assert gate_of(Config(), num_keys=9, block_bytes=1, now=0.0) is None
    for settings in ({"disk_after": "asked-twice"}, {"disk_write_per_day": "1GiB"}):
        config = Config.from_dict({"disk_after": "evicted", **settings})
        assert gate_of(config, num_keys=9, block_bytes=1, now=0.0) is not None


def desk_of(name: TierName = DISK, **settings: Any) -> Desk:
    level = PlacedLevel(name, Pool(200), WriteMode.SPILL)
    return Desk(levels=[level], slots=16, block_bytes=[1000], **settings)


def live(desk: Desk, *numbers: int) -> set[int]:
    """Conversations come in this order; which of them are on the level at the end."""
    for turn, number in enumerate(numbers):
        told = story(number, 8)
        desk.match(f"t{turn}", told)
        desk.keep(f"t{turn}", told, 32)
        for _ in range(4):
            desk.run()
    pool = desk.scheduler._parts.lower.levels[0].pool
    assert pool is not None
    matcher = desk.scheduler._parts.matcher
    chains = {n: matcher.slot_keys(0, story(n, 8), range(8)) for n in numbers}
    return {number for number, chain in chains.items() if pool.cached(chain).all()}


def test_only_what_was_asked_for_again_is_written() -> None:
    order = (1, 1, 2, 3, 4, 5, 6)
    assert live(desk_of(disk_after="evicted"), *order) >= {1, 2, 3, 4}
    desk = desk_of(disk_after="asked-twice")
    assert live(desk, *order) == {1}


def test_other_levels_take_what_they_always_took() -> None:
    desk = desk_of(TierName("store"), disk_after="asked-twice", disk_write_per_day=1)
    assert live(desk, 1, 2, 3, 4, 5, 6) >= {1, 2, 3}


def test_the_budget_ends_writing_and_time_brings_it_back() -> None:
    desk = desk_of(disk_after="evicted", disk_write_per_day=8 * 10 * 1000)
    live(desk, 1, 2, 3, 4, 5, 6)
    pool = desk.scheduler._parts.lower.levels[0].pool
    assert pool is not None
    assert pool.counts.cached <= 10
    desk.now += DAY
    live(desk, 7, 8, 9)
    assert 10 < pool.counts.cached <= 20
    desk.check_empty()


def test_what_must_be_asked_for_again_is_written_before_it_goes() -> None:
    """As it is stored it was asked for once: written through, nothing would ever be there."""
    level = PlacedLevel(DISK, Pool(200), WriteMode.THROUGH)
    desk = Desk(levels=[level], slots=16, block_bytes=[1000], disk_after="asked-twice")
    assert live(desk, 1, 1, 2, 3, 4, 5, 6) == {1}
