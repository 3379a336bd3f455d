"""Every way in which a short chain can lie on the host and on a tier below, and what is done then.

The host has a beginning of it, of which some is still on its way in; the tier has any of its
blocks. Whatever is where: a drop leaves nothing of it anywhere, also of what lands later; a pin and
a keep hold, on some tier, every block that can be reached and read, and say how many still come.

One-line breaks that were seen to make this fail:

- ``OnTier.find`` takes a pool's leading blocks alone
- ``ChainPlaces.hold`` ends at the first tier that holds all it has; holds what is not reached
- ``ChainPlaces.on_their_way`` finds nothing
- ``PoolWishes.drop`` leaves alone what is being written
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.pools import cached_slots

from kvferry.cache.pool import Pool
from kvferry.hints import Hints
from kvferry.scheduler.tier import SlotTier
from kvferry.types import TierName

LENGTH = 4
CHAIN = story(1, LENGTH)


def ways():
    """How many blocks the host has and is getting, and which the tier has."""
    for there, known in itertools.combinations_with_replacement(range(LENGTH + 1), 2):
        for below in itertools.product((False, True), repeat=LENGTH):
            yield there, known, np.array(below)


def lay(there: int, known: int, below: np.ndarray) -> tuple[Desk, Pool]:
    tier = SlotTier(TierName("disk"), Pool(4 * LENGTH, pin_share=0.5))
    desk = Desk(slots=4 * LENGTH, tiers=[tier], pin_share="50%")
    if below.any():
        spilled = tier.pool.reserve(CHAIN.take(below), chained=False)
        assert spilled is not None
        spilled.commit()
    if there:
        desk.keep("a", CHAIN[:there], 4 * there)
    if known > there:
        desk.store("b", CHAIN[:known], 4 * known)
        desk.scheduler.finish("b")
        desk.plan()
    return desk, tier.pool


def settle(desk: Desk) -> None:
    desk.land()
    desk.run()
    desk.check_empty()


@pytest.mark.timeout(120)
def test_a_drop_leaves_nothing_anywhere() -> None:
    for there, known, below in ways():
        desk, disk = lay(there, known, below)
        told = desk.scheduler.control.drop(CHAIN)
        assert (told.blocks, told.refused) == (known + below.sum(), ())
        desk.scheduler.check_integrity()
        assert desk.pool.counts.leased == known - there, "a rank may still write these"
        settle(desk)
        assert not (desk.pool.known(CHAIN) | disk.known(CHAIN)).any()
        assert desk.pool.counts.free == desk.pool.num_slots


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_pin", [True, False])
def test_a_hold_covers_all_that_can_be_reached(is_pin: bool) -> None:
    for there, known, below in ways():
        desk, disk = lay(there, known, below)
        control = desk.scheduler.control
        if is_pin:
            told = control.pin(CHAIN)
        else:
            told = control.hint(CHAIN, Hints(pin_seconds=60.0))
        here = (np.arange(LENGTH) < there) | below
        reached = np.logical_and.accumulate((np.arange(LENGTH) < known) | below)
        held = np.zeros(LENGTH, dtype=bool)
        for pool in (desk.pool, disk):
            slots = cached_slots(pool, CHAIN)
            held[slots >= 0] |= pool.eviction.pins.pinned(slots[slots >= 0])
        assert held.tolist() == (here & reached).tolist(), (there, known, below)
        assert not is_pin or told.blocks == held.sum()
        coming = int(np.count_nonzero(reached & ~here))
        words = f"{coming} blocks are still being copied"
        assert [each.startswith(words) for each in told.refused] == [True] * bool(coming)
        control.unpin(CHAIN)
        assert desk.pool.counts.pinned == disk.counts.pinned == 0
        settle(desk)
