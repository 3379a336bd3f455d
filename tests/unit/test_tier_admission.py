"""What goes to a disk or a shared store at all: what is asked for again, so many bytes a day."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk, story

from kvferry.cache.pool import Pool
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode, lower_tier
from kvferry.scheduler.writeback import TierAdmission
from kvferry.settings.tiers import DISK, REMOTE
from kvferry.types import TierName

DAY = 86400.0


def test_no_day_sees_more_than_its_bytes() -> None:
    """However it is spent: at once, bit by bit, after a rest."""
    for pause in (1.0, 600.0, DAY / 3, 2 * DAY):
        admission, now = TierAdmission(bytes_per_day=80_000, block_bytes=1), 0.0
        spent: list[tuple[float, int]] = []
        while now < 3 * DAY:
            num_bytes = admission.bytes_left(now)
            admission.wrote(num_bytes)
            spent.append((now, num_bytes))
            now += pause if len(spent) % 50 else 40_000.0
        for at, _ in spent[::7]:
            within = sum(count for then, count in spent if at <= then < at + DAY)
            assert within <= 80_000


def test_bytes_come_back_over_the_day() -> None:
    admission = TierAdmission(bytes_per_day=80_000, block_bytes=1)
    assert admission.bytes_left(0.0) == 10_000
    admission.wrote(10_000)
    assert admission.bytes_left(0.0) == 0
    assert admission.bytes_left(DAY / 14) == pytest.approx(5_000, abs=2)
    assert admission.bytes_left(5 * DAY) == 10_000


def test_an_admission_counts_requests_and_bytes() -> None:
    admission = TierAdmission(times=2, num_keys=100, bytes_per_day=8 * 30, block_bytes=10)
    some = keys(range(6))
    assert not admission.admits(some, 0.0).any()
    admission.requested(some)
    admission.requested(some[1:])
    assert admission.admits(some, 0.0).tolist() == [False, True, True, True, False, False], (
        "30 bytes"
    )
    admission.wrote(3)
    assert not admission.admits(some, 0.0).any()
    assert admission.admits(some, DAY / 7).sum() == 3


def desk_of(name: TierName = DISK, **settings: Any) -> Desk:
    tier = SlotTier(name, Pool(200), WriteMode.SPILL)
    return Desk(tiers=[tier], slots=16, block_bytes=[1000], **settings)


def live(desk: Desk, *numbers: int) -> set[int]:
    """Conversations come in this order; which of them are on the tier at the end."""
    for turn, number in enumerate(numbers):
        told = story(number, 8)
        desk.match(f"t{turn}", told)
        desk.keep(f"t{turn}", told, 32)
        for _ in range(4):
            desk.run()
    pool = desk.scheduler.lower.tiers[0].pool
    assert pool is not None
    matcher = desk.scheduler.matcher
    chains = {n: matcher.slot_keys(0, story(n, 8), range(8)) for n in numbers}
    return {number for number, chain in chains.items() if pool.cached(chain).all()}


def test_only_what_was_asked_for_again_is_written() -> None:
    order = (1, 1, 2, 3, 4, 5, 6)
    assert live(desk_of(disk_admission="all"), *order) >= {1, 2, 3, 4}
    desk = desk_of(disk_admission="requested-twice")
    assert live(desk, *order) == {1}


def test_other_tiers_take_what_they_always_took() -> None:
    desk = desk_of(TierName("store"), disk_admission="requested-twice", disk_write_per_day="1B")
    assert live(desk, 1, 2, 3, 4, 5, 6) >= {1, 2, 3}


def test_the_budget_ends_writing_and_time_brings_it_back() -> None:
    desk = desk_of(disk_admission="all", disk_write_per_day="80kB")
    live(desk, 1, 2, 3, 4, 5, 6)
    pool = desk.scheduler.lower.tiers[0].pool
    assert pool is not None
    assert pool.counts.cached <= 10
    desk.now += DAY
    live(desk, 7, 8, 9)
    assert 10 < pool.counts.cached <= 20
    desk.check_empty()


def test_what_must_be_asked_for_again_is_written_before_it_goes() -> None:
    """As it is stored it was asked for once: written through, nothing would ever be there."""
    tier = SlotTier(DISK, Pool(200), WriteMode.THROUGH)
    desk = Desk(tiers=[tier], slots=16, block_bytes=[1000], disk_admission="requested-twice")
    assert live(desk, 1, 1, 2, 3, 4, 5, 6) == {1}


def written(desk: Desk, *numbers: int) -> set[int]:
    """Conversations come in this order, the store has nothing; which of them it was sent, whole."""
    sent: set[Key] = set()
    for turn, number in enumerate(numbers):
        told = story(number, 8)
        desk.match(f"t{turn}", told)
        desk.plan()
        desk.say(Keys.empty())
        desk.match(f"t{turn}", told)
        desk.store(f"t{turn}", told, 32)
        desk.scheduler.finish(f"t{turn}")
        for _ in range(5):
            desk.plan()
            for move in desk.flying:
                if move.dst == REMOTE and move.keys is not None:
                    sent |= set(Keys(move.keys))
            desk.land()
    desk.check_empty()
    chain = desk.scheduler.matcher.slot_keys
    whole = {number: set(chain(0, story(number, 8), range(8))) for number in numbers}
    assert not any(0 < len(keys & sent) < len(keys) for keys in whole.values()), "a part is no use"
    return {number for number, keys in whole.items() if keys <= sent}


@pytest.mark.parametrize("most_in_one", [1, 4], ids=["a block an object", "packs"])
@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.SPILL])
def test_only_what_was_asked_for_again_is_shared(write: WriteMode, most_in_one: int) -> None:
    order = (1, 1, 2, 3, 4, 5, 6)

    def server(after: str) -> Desk:
        tier = lower_tier(REMOTE, None, write, most_in_one=most_in_one)
        return Desk(tiers=[tier], slots=16, block_bytes=[1000], remote_admission=after)

    assert written(server("all"), *order) >= {1, 2, 3, 4}
    assert written(server("requested-twice"), *order) == {1}


def test_what_was_forgotten_meanwhile_is_shared_when_it_came_back() -> None:
    """Host memory had dropped it, unwritten; its second coming counts all the same."""
    tier = KeyedTier(REMOTE, WriteMode.THROUGH)
    desk = Desk(tiers=[tier], slots=16, block_bytes=[1000], remote_admission="requested-twice")
    assert written(desk, 1, 2, 3, 4, 1, 5, 6, 7) == {1}


def test_each_setting_holds_for_its_own_tier() -> None:
    disk, store = SlotTier(DISK, Pool(200)), KeyedTier(REMOTE)
    desk = Desk(
        tiers=[disk, store], slots=16, block_bytes=[1000], remote_admission="requested-twice"
    )
    assert written(desk, 1, 1, 2, 3, 4, 5, 6) == {1}
    assert disk.pool.counts.cached >= 4 * 8
    desk = desk_of(disk_admission="requested-twice", remote_admission="all")
    assert live(desk, 1, 1, 2, 3, 4, 5, 6) == {1}
