"""One request's verbs: what it remembers, and that nothing is remembered for ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.fakes.desk import FULL, Desk, story
from tests.fakes.pools import cached_slots
from tests.model import request_laws
from tests.model.request_verbs import Blocks

from kvferry.cache.pool import Pool
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import MatchState


def test_a_hit_asked_again_for_other_keys_is_looked_up_anew() -> None:
    """Seen red with a hit that answers for any keys: it loaded the old tokens' blocks."""
    desk = Desk()
    desk.keep("a", story(1, 2), 8)
    desk.keep("b", story(2, 2), 8)
    request = desk.scheduler.open("r", story(1, 2))
    assert request.match().num_tokens == 8
    request.chain = story(2, 2)
    assert request.match().num_tokens == 8
    (ordered,) = request.load([[8, 9]])
    wanted = desk.scheduler.matcher.names[0].all(story(2, 2))
    (load,) = desk.plan()
    assert load.src_slots.tolist() == cached_slots(desk.pool, wanted).tolist()
    assert ordered.keys == wanted


OVER: list[tuple[str, Callable[[Request], object]]] = [
    ("match", lambda request: request.match()),
    ("run", lambda request: request.run()),
    ("store", lambda request: request.store([[0, 1]], 8)),
]


@pytest.mark.parametrize(("verb", "call"), OVER, ids=[verb for verb, _ in OVER])
def test_a_request_that_has_ended_is_refused(verb: str, call: Callable[[Request], object]) -> None:
    desk = Desk()
    desk.keep("a", story(1, 2), 8)
    request = desk.scheduler.open("r", story(1, 2))
    request.match()
    request.end()
    with pytest.raises(InputError, match=r"'r' has ended .* open a new one"):
        call(request)
    request.end()
    request.preempt()
    assert request.leave(8) == ()
    assert request.load([[0, 1]]) == ()
    assert request.state is State.ENDED
    request_laws.check_nothing_left(desk.scheduler)


def test_a_hit_of_a_chain_that_has_become_another_is_not_loaded() -> None:
    """Seen red: the old tokens' blocks were loaded, and the request took them for its own."""
    desk = Desk()
    desk.keep("a", story(1, 3), 12)
    request = desk.scheduler.open("r", story(1, 2))
    assert request.match().num_tokens == 8
    request.chain = story(1, 3)  # it has grown: what was found is its beginning
    assert len(request.load([[8, 9]])) == 1
    for changed in (story(2, 2), story(1, 1), story(1, 1) + story(2, 1)):
        request.preempt()
        desk.run()
        request.chain = story(1, 2)
        assert request.match().num_tokens == 8
        request.chain = changed
        assert request.load([[8, 9]]) == ()
        assert request.state is State.UNKNOWN
        assert desk.pool.num_leases == 0
        request_laws.check(desk.scheduler, [request])
    request.end()
    request_laws.check_nothing_left(desk.scheduler)


def with_a_rest() -> tuple[Scheduler, Request]:
    """A scheduler, and a request that has left two blocks to be stored late."""
    scheduler = Scheduler(
        Pool(16), (FULL,), num_device_blocks=1000, engine=Blocks(evicts=False), clock=lambda: 0.0
    )
    left = scheduler.open("1", story(1, 2))
    left.match()
    left.run()
    left.leave(8)
    assert left.state is State.LEFT
    return scheduler, left


def test_a_request_that_runs_after_a_miss_continues_what_another_left() -> None:
    """Seen red with a run that does not continue it: the rest was stored on its own."""
    scheduler, left = with_a_rest()
    request = scheduler.open("2", story(1, 3))
    assert request.match(computed_tokens=8).state is MatchState.MISS
    request.run()
    assert left not in scheduler
    (ordered,) = request.store([[10, 11, 12]], 12)
    assert ordered.blocks.tolist() == [10, 11, 12]


def test_of_two_requests_that_end_alike_one_is_stored() -> None:
    scheduler, left = with_a_rest()
    twin = scheduler.open("2", story(1, 2))
    twin.match()
    twin.run()
    twin.leave(8)
    assert (left.state, twin.state) == (State.ENDED, State.LEFT)
    request_laws.check(scheduler, [left, twin])
    assert len(scheduler.store_left(is_idle=True)) == 1


def test_one_that_may_not_be_stored_takes_nothing_from_those_that_may() -> None:
    """Seen red: it took the rest of the turn before, and stored nothing of it."""
    scheduler, left = with_a_rest()
    request = scheduler.open("2", story(1, 3), Hints(max_store_tokens=0))
    request.match(computed_tokens=8)
    request.run()
    assert left in scheduler
    (ordered,) = scheduler.store_left(is_idle=True)
    assert len(ordered.blocks) == 2
    request.end()


def test_after_a_reset_one_that_starts_from_nothing_is_stored() -> None:
    """Seen red with what a reset said of its old blocks still counting for the new ones."""
    desk = Desk()
    request = desk.scheduler.open("r", story(1, 2))
    request.match()
    request.run()
    desk.scheduler.reset()
    assert request.store([[0, 1]], 8) == ()
    request.match(computed_tokens=4)
    assert request.store([[0, 1]], 8) == ()  # it still has a block of before
    request.match()
    (ordered,) = request.store([[2, 3]], 8)
    assert ordered.blocks.tolist() == [2, 3]


def test_one_with_more_tokens_than_keys_goes_on_with_nothing() -> None:
    """Seen red: it looked for a key that its chain does not have, and raised an IndexError."""
    scheduler, left = with_a_rest()
    request = scheduler.open("2", story(2, 1))
    assert request.match(computed_tokens=40).state is MatchState.MISS
    request.run()
    assert request.state is State.RUNNING
    assert left.state is State.LEFT


def test_a_table_that_the_engine_writes_again_changes_no_order() -> None:
    """An engine keeps its table and goes on writing it while the blocks are being copied.

    Seen red with the table's own memory in the orders: other blocks were copied, and released.
    """
    desk = Desk()
    table = np.array([3, 4], dtype=np.int64)
    writer = desk.scheduler.open("w", story(1, 2))
    (stored,) = writer.store([table], 8)
    table[:] = 9
    (store,) = desk.plan()
    assert store.src_slots.tolist() == stored.blocks.tolist() == [3, 4]
    assert [part.blocks.tolist() for part in desk.land().released] == [[3, 4]]
    reader = desk.scheduler.open("r", story(1, 2))
    reader.match()
    table[:] = [5, 6]
    (loaded,) = reader.load([table])
    table[:] = 9
    (load,) = desk.plan()
    assert load.dst_slots.tolist() == loaded.blocks.tolist() == [5, 6]
    assert [part.blocks.tolist() for part in desk.land().released] == [[5, 6]]


def test_a_store_is_worth_a_block_that_is_new() -> None:
    desk = Desk(spare_tokens=2)
    desk.keep("a", story(1, 3), 12)
    request = desk.scheduler.open("r", story(1, 4))
    assert request.match(max_tokens=8).num_tokens == 4  # the last two of eight are computed again
    request.load([[8]])
    desk.land(*desk.plan())
    assert [n for n in range(17) if request.is_worth_storing(n)] == list(range(8, 17))
    request.store([[8, 9, 10]], 10)
    assert not request.is_worth_storing(11)
    assert request.is_worth_storing(12)
    desk.run()
    request.end()
