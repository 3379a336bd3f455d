"""A conversation's blocks lie side by side on a tier, whatever order they came in."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys as numbered
from tests.fakes.desk import Desk, story
from tests.fakes.pools import cached_slots

from kvferry.cache.free_runs import EXTENT, FreeRuns, SlotPlacement
from kvferry.cache.pool import Pool
from kvferry.cache.slots import as_slots
from kvferry.errors import InputError
from kvferry.scheduler.tier import SlotTier, WriteMode, WriteOrder, lower_tier
from kvferry.types import NO_SLOT, MatchState, SlotArray, TierName

DISK = TierName("disk")


def num_runs(slots: SlotArray) -> int:
    return 1 + int(np.count_nonzero(np.diff(slots) != 1))


def free(num_slots: int) -> FreeRuns:
    runs = FreeRuns(num_slots)
    runs.push(np.arange(num_slots))
    return runs


def beside(
    *lengths: int, wanted: SlotArray | None = None, grows_down: bool = True
) -> SlotPlacement:
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    none = np.full(len(numbers), NO_SLOT)
    return SlotPlacement(none if wanted is None else wanted, numbers, grows_down)


def test_each_piece_has_an_extent_whose_rest_is_for_its_neighbours() -> None:
    runs = free(8 * EXTENT)
    slots = runs.take(30, beside(10, 20))
    for piece in (slots[:10], slots[10:]):
        assert num_runs(piece) == 1
        assert (piece[-1] + 1) % EXTENT == 0, "room before it, where its beginning goes"
    first = int(slots[0])
    wanted = np.arange(first - 5, first)
    assert runs.take(5, beside(5, wanted=wanted)).tolist() == wanted.tolist()
    behind = runs.take(7, beside(7, grows_down=False))
    assert behind[0] % EXTENT == 0
    assert num_runs(behind) == 1
    assert runs.count == 8 * EXTENT - 42


def test_what_is_wanted_and_taken_goes_into_the_tightest_hole() -> None:
    runs = FreeRuns(4 * EXTENT)
    for hole in ((10, 13), (70, 76), (130, 134)):
        runs.push(np.arange(*hole))
    wanted = np.array([10, 10, 200])  # one is wanted twice, one is not free
    slots = runs.take(3, SlotPlacement(wanted, np.array([0, 1, 2]), True))
    assert slots[0] == 10
    assert sorted(slots.tolist()) == [10, 11, 12]
    assert runs.take(4, beside(4)).tolist() == [130, 131, 132, 133]
    assert runs.count == 6
    runs.take(6, None)
    assert runs.count == 0
    assert not len(runs.slots)


def test_pieces_longer_than_any_hole_are_cut() -> None:
    runs = FreeRuns(1000)
    for start in range(0, 1000, 10):
        runs.push(np.arange(start, start + 5))
    slots = runs.take(500, beside(500))
    assert len(set(slots.tolist())) == 500
    assert num_runs(slots) <= 100 + 4
    assert runs.count == 0


def test_free_slots_survive_any_use() -> None:
    rng = random.Random(4)
    runs, used = free(700), set[int]()
    for _ in range(600):
        count = rng.randint(0, min(60, runs.count))
        cut = rng.randint(0, count)
        wanted = np.array([rng.randint(-3, 720) for _ in range(count)], dtype=np.int64)
        slots = runs.take(count, beside(cut, count - cut, wanted=wanted)).tolist()
        assert len(set(slots)) == count
        assert not used & set(slots)
        used |= set(slots)
        back = rng.sample(sorted(used), rng.randint(0, len(used)))
        used -= set(back)
        runs.push(as_slots(sorted(back)))
        assert set(runs.slots.tolist()) == set(range(700)) - used
        assert runs.count == 700 - len(used)
        assert len(runs._hints) <= 2 * 11 + EXTENT + 11


def test_what_is_given_out_next_must_be_free() -> None:
    runs = free(10)
    runs.give_out_next(as_slots([7, 2]))
    assert runs.take(2).tolist() == [7, 2]
    with pytest.raises(InputError, match="some are not free"):
        runs.give_out_next(as_slots([7]))


def test_a_conversation_spilled_bit_by_bit_lies_in_one_run() -> None:
    """Its end goes first, and its beginning in front of that."""
    tier = lower_tier(DISK, 1000, WriteMode.SPILL)
    assert isinstance(tier, SlotTier)
    host = Pool(100)
    chain = numbered(range(60))
    lease = host.reserve(chain)
    assert lease is not None
    lease.commit()
    for start, end in pairwise([0, 7, 20, 30, 60]):
        part = chain[60 - end : 60 - start]
        room = tier.reserve(WriteOrder(part, runs=host.runs_of(part)), 0.0)
        assert room is not None
        lease = room[1]
        assert lease is not None
        lease.commit()
    assert num_runs(cached_slots(tier.pool, chain)) == 1


def live(tier: SlotTier, *, steps: int, seed: int) -> float:
    """Conversations that come back and grow, over a tier that is full; blocks per run then."""
    rng = random.Random(seed)
    desk = Desk(tiers=[tier], slots=240)
    lengths: list[int] = []
    for step in range(steps):
        if not lengths or rng.random() < 0.3:
            lengths.append(0)
        chat = rng.randrange(max(0, len(lengths) - 30), len(lengths))
        lengths[chat] = min(400, lengths[chat] + rng.choice([3, 5, 10, 20, 60]))
        name, keys = f"r{step}", story(chat, lengths[chat])
        while (match := desk.match(name, keys)).state is MatchState.WAIT:
            desk.run()
        if match.state is MatchState.HIT:
            desk.load(name, match.num_tokens)
            desk.run()
        desk.store(name, keys, 4 * lengths[chat])
        desk.scheduler.finish(name)
        desk.run()
        desk.run()
    tier.pool.check_integrity()
    assert tier.pool.counts.evicted > 2 * tier.pool.num_slots
    chains = [story(chat, length) for chat, length in enumerate(lengths)]
    found = [cached_slots(tier.pool, chain) for chain in chains]
    found = [slots[slots != NO_SLOT] for slots in found]
    long = [slots for slots in found if len(slots) >= 16]
    assert len(long) > 10
    return sum(map(len, long)) / sum(map(num_runs, long))


@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.SPILL])
def test_they_still_do_after_a_long_random_life(write: WriteMode) -> None:
    """At least one and a half times as long as where slots are given out as they become free."""
    plain = SlotTier(DISK, Pool(1600), write)
    ours = lower_tier(DISK, 1600, write)
    assert isinstance(ours, SlotTier)
    strewn, together = (live(tier, steps=450, seed=2) for tier in (plain, ours))
    assert together > 1.5 * strewn, (strewn, together)
