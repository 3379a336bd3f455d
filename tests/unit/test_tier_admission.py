"""What goes to a disk or a shared store at all: what is asked for again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.desk import Desk, story

from kvferry.cache.pool import Pool
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode, lower_tier
from kvferry.settings.tiers import DISK, REMOTE
from kvferry.types import TierName


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
    chains = {n: matcher.names[0].of(story(n, 8), range(8)) for n in numbers}
    return {number for number, chain in chains.items() if pool.cached(chain).all()}


def test_only_what_was_asked_for_again_is_written() -> None:
    order = (1, 1, 2, 3, 4, 5, 6)
    assert live(desk_of(disk_admission="all"), *order) >= {1, 2, 3, 4}
    desk = desk_of(disk_admission="requested-twice")
    assert live(desk, *order) == {1}


def test_other_tiers_take_what_they_always_took() -> None:
    desk = desk_of(TierName("store"), disk_admission="requested-twice")
    assert live(desk, 1, 2, 3, 4, 5, 6) >= {1, 2, 3}


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
    names = desk.scheduler.matcher.names[0]
    whole = {number: set(names.all(story(number, 8))) for number in numbers}
    assert not any(0 < len(keys & sent) < len(keys) for keys in whole.values()), "a part is no use"
    return {number for number, keys in whole.items() if keys <= sent}


@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.SPILL])
def test_only_what_was_asked_for_again_is_shared(write: WriteMode) -> None:
    order = (1, 1, 2, 3, 4, 5, 6)

    def server(after: str) -> Desk:
        tier = lower_tier(REMOTE, None, write)
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
