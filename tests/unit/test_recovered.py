"""After a restart: what all ranks found at the same place is there again, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.pool import Pool
from kvferry.cache.slots import as_slots
from kvferry.core.keys import Recovered
from kvferry.errors import InputError
from kvferry.scheduler.tier import SlotTier, WriteMode, agreed, lower_tier, united
from kvferry.types import Opened, TierName

DISK = TierName("disk")


def found(*pairs: tuple[int, int]) -> Recovered:
    return keys(number for number, _ in pairs), as_slots([place for _, place in pairs])


def test_a_key_at_two_places_counts_where_it_was_written_last() -> None:
    """A tier is not told of what our pool evicts: a block may be written again elsewhere."""
    first = found((1, 5), (2, 0), (1, 3))
    kept, places = agreed([first], 8)
    assert kept == keys([2, 1])
    assert places.tolist() == [0, 3]
    second = found((1, 5), (2, 0), (9, 3))  # the second write failed there: what both have counts
    kept, places = agreed([first, second], 8)
    assert kept == keys([1, 2])
    assert places.tolist() == [5, 0]


def test_ranks_with_places_of_their_own_add_up() -> None:
    kept, places = united([found((1, 0), (2, 3)), found((3, 0)), found()], 4)
    assert dict(zip(kept, places.tolist(), strict=True)) == dict(
        zip(keys([1, 2, 3]), [0, 9, 1], strict=True)
    )
    kept, places = united([found((1, 0)), found((1, 2))], 4)
    assert len(kept) == 1
    assert places.tolist() in ([0], [5])


def test_places_that_others_lack_are_left_out() -> None:
    ranks = [
        Opened(8, keys([1, 2]).array, as_slots([7, 3])),
        Opened(4, keys([2]).array, as_slots([3])),
    ]
    tier = lower_tier(DISK, 4, WriteMode.SPILL, recovered=ranks)
    assert tier.pool is not None
    assert tier.pool.match(keys([2])) == tier.pool.counts.cached == 1


def test_a_tier_that_is_wrong_begins_empty(caplog: pytest.LogCaptureFixture) -> None:
    tier = lower_tier(
        DISK, 4, WriteMode.SPILL, recovered=[Opened(4, keys([1]).array, as_slots([9]))]
    )
    assert tier.pool is not None
    assert tier.pool.counts.cached == 0
    assert "begins empty" in caplog.text


def test_many_blocks_are_restored_and_the_oldest_go_first() -> None:
    rng = np.random.default_rng(5)
    places = rng.permutation(20_000)[:10_000]
    tier = lower_tier(
        DISK,
        20_000,
        WriteMode.SPILL,
        recovered=[Opened(20_000, keys(range(10_000)).array, as_slots(places))],
    )
    assert isinstance(tier, SlotTier)
    assert tier.num_restored == 10_000
    tier.pool.check_integrity()
    coldest = list(tier.pool.eviction.coldest(4096))
    assert set(coldest) == set(keys(range(4096))), "what was written first goes first"
    assert coldest[0] == keys([4095])[0], "but of what was written together, the end"


@pytest.mark.parametrize("bad", [found((1, 8)), found((1, 2), (3, 2))])
def test_what_cannot_be_is_refused_by_rank(bad: Recovered) -> None:
    with pytest.raises(InputError, match="rank 1 recovered"):
        agreed([found((1, 2)), bad], 8)


def test_nothing_is_restored_over_what_is_there() -> None:
    tier = SlotTier(DISK, Pool(4))
    lease = tier.pool.reserve(keys([1]))
    assert lease is not None
    lease.commit()
    with pytest.raises(InputError, match="some are not free"):
        tier.restore([(keys([2]), lease.slots)])
    tier.pool.check_integrity()
    tier.restore([(keys([2]), as_slots([3]))])
    tier.pool.check_integrity()
    assert tier.pool.cached(keys([1, 2])).all()
    got = tier.pool.reserve(keys(range(10, 12)))
    assert got is not None
    assert sorted([*got.slots, *lease.slots, 3]) == [0, 1, 2, 3]
    got.abort()
    assert tier.restore([found()]) == 0
