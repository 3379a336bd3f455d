"""A store that is busy is not one that hangs: what orders tell of it that end without an answer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.driven_store import (
    BLOCK_BYTES,
    NUM_CALLS,
    OBJECTS,
    REFUSES,
    SAYS_NO,
    Answer,
    Busy,
    driven,
    run,
)

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.health import FIRST_WAIT


@pytest.fixture
def busy() -> Iterator[Busy]:
    with driven() as made:
        yield made


def test_a_busy_store_is_not_left_alone_for_a_batch_whose_turn_came_too_late(busy: Busy) -> None:
    """Seen red without a look at when the store last answered: it was left alone."""

    async def story() -> None:
        others = busy.order(NUM_CALLS, within=100.0)
        await busy.settle()
        late = busy.order(8, within=1.0)
        await busy.settle(0.5)
        assert not late.done()
        await busy.answer(SAYS_NO)
        assert len(busy.store.waiting) == NUM_CALLS, "now it is his turn"
        await busy.settle(1.0)
        reasons = set((await late).reasons.values())
        assert reasons == {"the store has not answered in time", "not begun in time"}
        assert not busy.ailment, "it answered others meanwhile"
        await others

    run(busy, story)


def test_a_store_that_gave_no_block_is_trusted_again_only_when_it_gives_one(busy: Busy) -> None:
    """Seen red where look-ups, or answers without a block, made the next wait short again."""

    async def answered(way: Way, answer: Answer | None = None) -> None:
        batch = busy.batch(1, 1.0, way)
        carried = busy.carry(batch)
        await busy.settle()
        if answer is None:
            block = memoryview(secrets.token_bytes(BLOCK_BYTES))
            answer = memoryview(bytes(block) + OBJECTS.seal(block, batch.keys[0]))
        await busy.answer(answer)
        await carried

    async def story() -> None:
        await answered(Way.READ, REFUSES)
        assert busy.ailment
        busy.breaker.probed()
        await answered(Way.FIND, SAYS_NO)
        await answered(Way.READ, SAYS_NO)
        assert busy.breaker.wait == 2 * FIRST_WAIT
        await answered(Way.READ)
        assert busy.breaker.wait == FIRST_WAIT

    run(busy, story)


def test_writes_that_found_no_room_tell_nothing_of_the_store(busy: Busy) -> None:
    """Seen red where they did: calls that had hung kept a store away that was well again."""
    cast(Any, busy.transfers)._staging = SimpleNamespace(lend=lambda count: [])

    async def story() -> None:
        result = await busy.order(2, within=1.0, way=Way.WRITE)
        assert set(result.reasons.values()) == {"too many calls to the store hang"}
        assert not busy.ailment

    run(busy, story)
