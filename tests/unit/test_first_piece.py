"""A store that must make room sends what needs none ahead: one ticket, one end, nothing half done.

One-line breaks that were tried; each made one of these tests fail.

- ``FerryStoring.store`` does not disown what went ahead when the rest raises
- ``Scheduler.disown`` leaves what is not sent off in the outbox
- ``FerryStoring._send_ahead`` does not write down what went ahead
- ``FirstPiece.num_blocks`` does not look for keys that are there twice
- ``FirstPiece.num_blocks`` splits what has room, or whose first block is kept
- ``Pool.make_spare`` is not called, or protects nothing of its own chain
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

import kvferry
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.ferry import FirstPiece
from kvferry.types import Transfer

SLOTS, BLOCKS, TOKENS, LAYERS = 256, 80, 4, 3
SPARE = SLOTS // 64
BLOCK_BYTES = LAYERS * 2 * TOKENS * 8
LONG = 30.0

Tensors = list[np.ndarray[Any, Any]]


@pytest.fixture
def kv() -> Tensors:
    rng = np.random.default_rng()
    return [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(LAYERS)]


@pytest.fixture
def ferry(kv: Tensors) -> Iterator[kvferry.Ferry]:
    host = str(SLOTS * BLOCK_BYTES)
    settings: dict[str, Any] = {"memory_curve": "off", "policy": "lru", "load_policy": "always"}
    with kvferry.attach(kv, model="m", block_tokens=TOKENS, host=host, **settings) as ferry:
        ferry._first_piece = FirstPiece(
            ferry._scheduler, BLOCK_BYTES, least=BLOCK_BYTES, most=8 * BLOCK_BYTES
        )
        yield ferry


@pytest.fixture
def sent(ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks every copy has that is submitted."""
    seen: list[int] = []
    submit = ferry._rank.engine.submit

    def noting(transfer: Transfer) -> None:
        seen.append(len(transfer))
        submit(transfer)

    monkeypatch.setattr(ferry._rank.engine, "submit", noting)
    return seen


def keys_of(ferry: kvferry.Ferry, number: int, count: int) -> Keys:
    return ferry.keys(range(10_000 * number, 10_000 * number + count * TOKENS))


def fill(ferry: kvferry.Ferry, size: int = 32) -> None:
    """Until room has to be made, and a few slots are free."""
    for number in range(SLOTS // size + 1):
        done = ferry.wait(ferry.store(keys_of(ferry, number, size), range(size)), LONG)
        assert done.num_blocks == size
    assert ferry._scheduler.pool.num_free == SPARE


def comes_back(ferry: kvferry.Ferry, kv: Tensors, chain: Keys, before: Tensors) -> None:
    hit = ferry.match(chain)
    assert len(hit) == len(chain)
    for layer in kv:
        layer[: len(chain)] = 0xEE
    assert ferry.wait(ferry.load(hit, range(len(chain))), LONG).ok
    for layer, bytes_before in zip(kv, before, strict=True):
        assert np.array_equal(layer[: len(chain)], bytes_before[: len(chain)])


def test_what_needs_no_room_goes_ahead(ferry: kvferry.Ferry, kv: Tensors, sent: list[int]) -> None:
    fill(ferry)
    sent.clear()
    for number in range(100, 110):
        keys, before = keys_of(ferry, number, 20), [layer.copy() for layer in kv]
        done = ferry.wait(ferry.store(keys, range(20)), LONG)
        assert (done.num_blocks, done.reason, done.ok) == (20, "", True)
        assert sum(sent) == 20
        assert len(sent) == 2
        assert 1 <= sent[0] <= SPARE
        ferry._scheduler.check_integrity()
        comes_back(ferry, kv, keys, before)
        assert ferry._scheduler.pool.num_free == SPARE
        sent.clear()


def test_it_goes_before_anybody_is_evicted(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ferry)
    pool = ferry._scheduler.pool
    evicted: list[int] = []
    submit = ferry._rank.engine.submit

    def noting(transfer: Transfer) -> None:
        evicted.append(pool.counts.evicted)
        submit(transfer)

    monkeypatch.setattr(ferry._rank.engine, "submit", noting)
    before = pool.counts.evicted
    ferry.wait(ferry.store(keys_of(ferry, 100, 20), range(20)), LONG)
    assert evicted == [before, before + 20]


def test_a_conversation_that_goes_on(ferry: kvferry.Ferry, kv: Tensors, sent: list[int]) -> None:
    fill(ferry)
    keys, before = keys_of(ferry, 100, 60), [layer.copy() for layer in kv]
    ferry.wait(ferry.store(keys[:20], range(20)), LONG)
    sent.clear()
    done = ferry.wait(ferry.store(keys, range(20, 60), first=20), LONG)
    assert (done.num_blocks, done.reason) == (40, "")
    assert len(sent) == 2
    ferry._scheduler.check_integrity()
    comes_back(ferry, kv, keys, before)


def test_one_piece_where_there_is_room_or_the_first_block_is_kept(
    ferry: kvferry.Ferry, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(ferry, 100, 40)
    ferry.wait(ferry.store(keys[:10], range(10)), LONG)
    assert sent == [10]
    fill(ferry, 30)
    while ferry._scheduler.pool.num_free > SPARE or not len(ferry.match(keys[:10])):
        ferry.wait(ferry.store(keys[:10], range(10)), LONG)
    sent.clear()
    pool, looked = ferry._scheduler.pool, []
    reserve = pool.reserve

    def noting(*args: Any, **kwargs: Any) -> Any:
        looked.append(1)
        return reserve(*args, **kwargs)

    monkeypatch.setattr(pool, "reserve", noting)
    assert ferry.wait(ferry.store(keys, range(40)), LONG).num_blocks == 30
    assert sent == [30]
    assert len(looked) == 1


def test_the_rest_finds_no_room(ferry: kvferry.Ferry, sent: list[int]) -> None:
    fill(ferry)
    hits = [ferry.match(keys_of(ferry, number, 32)) for number in range(SLOTS // 32 + 1)]
    hits = [hit for hit in hits if len(hit)]
    sent.clear()
    done = ferry.wait(ferry.store(keys_of(ferry, 100, 20), range(20)), LONG)
    assert done.num_blocks == sum(sent) < 20
    assert done.ok
    assert f"blocks {done.num_blocks} to 19" in done.reason
    assert len(ferry.match(keys_of(ferry, 100, 20))) == done.num_blocks
    ferry._scheduler.check_integrity()


def test_a_key_that_is_there_twice_is_refused_before_a_byte_moves(
    ferry: kvferry.Ferry, sent: list[int]
) -> None:
    fill(ferry)
    sent.clear()
    once = keys_of(ferry, 100, 10)
    with pytest.raises(InputError, match="not distinct"):
        ferry.store(once + once, range(20))
    assert not sent
    ferry._scheduler.check_integrity()


@pytest.mark.parametrize("number", [0, 1])
def test_either_piece_fails(
    ferry: kvferry.Ferry, kv: Tensors, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fill(ferry)
    keys, before = keys_of(ferry, 100, 20), [layer.copy() for layer in kv]
    submit = ferry._rank.engine.submit
    seen: list[int] = []

    def failing(transfer: Transfer) -> None:
        seen.append(len(transfer))
        if len(seen) == number + 1:
            raise OSError("no")
        submit(transfer)

    monkeypatch.setattr(ferry._rank.engine, "submit", failing)
    done = ferry.wait(ferry.store(keys, range(20)), LONG)
    assert not done.ok
    assert "no" in done.reason
    assert done.num_blocks == seen[1 - number]
    assert len(ferry.match(keys)) == (0 if number == 0 else seen[0])
    ferry._scheduler.check_integrity()
    monkeypatch.setattr(ferry._rank.engine, "submit", submit)
    assert ferry.wait(ferry.store(keys, range(20)), LONG).ok
    comes_back(ferry, kv, keys, before)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_went_ahead_is_never_found_if_the_rest_raises(
    ferry: kvferry.Ferry,
    kv: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[int],
    error: type[BaseException],
) -> None:
    """Its caller has no ticket, and may write to the blocks that are being read."""
    fill(ferry)
    sent.clear()
    keys, before = keys_of(ferry, 100, 20), [layer.copy() for layer in kv]
    pool = ferry._scheduler.pool
    reserve: Callable[..., Any] = pool.reserve
    calls: list[int] = []

    def raising(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return reserve(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "reserve", raising)
        with pytest.raises(error):
            ferry.store(keys, range(20))
    assert len(sent) == 1
    assert not len(ferry.match(keys))
    while ferry._scheduler.num_in_flight:
        ferry.poll(0.01)
    assert not len(ferry.match(keys))
    ferry._scheduler.check_integrity()
    assert ferry.wait(ferry.store(keys, range(20)), LONG).num_blocks == 20
    comes_back(ferry, kv, keys, before)


@pytest.mark.parametrize("where", ["plan", "make_spare"])
@pytest.mark.parametrize("size", [20, 3])
def test_wherever_a_store_raises_nothing_of_it_is_found(
    ferry: kvferry.Ferry, kv: Tensors, monkeypatch: pytest.MonkeyPatch, where: str, size: int
) -> None:
    """Also of one that was ordered and not sent: it must not go with the next one."""
    fill(ferry)
    chain = keys_of(ferry, 100, size)
    owner: Any = {
        "plan": ferry._scheduler,
        "make_spare": ferry._scheduler,
    }[where]
    did = getattr(owner, where)
    for time in range(1, 7):
        calls: list[int] = []

        def raising(*args: Any, calls: list[int] = calls, time: int = time, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == time:
                raise MemoryError
            return did(*args, **more)

        with monkeypatch.context() as patched:
            patched.setattr(owner, where, raising)
            try:
                done = ferry.wait(ferry.store(chain, range(size)), LONG)
            except MemoryError:
                for layer in kv:
                    layer[:size] = 0xEE
            else:
                assert done.num_blocks == size
                break
        hit = ferry.match(keys_of(ferry, SLOTS // 32, 1))
        assert ferry.wait(ferry.load(hit, [60]), LONG).num_blocks == 1
        other = keys_of(ferry, 1000 + time, 5)
        ferry.wait(ferry.store(other, range(40, 45)), LONG)
        assert not len(ferry.match(chain))
        while ferry._scheduler.num_in_flight:
            ferry.poll(0.01)
        ferry._scheduler.check_integrity()
        assert not ferry._scheduler._parts.transit.num_bytes
    else:
        pytest.fail("it raised every time")
    comes_back(ferry, kv, chain, [layer.copy() for layer in kv])


def test_a_reset_while_both_are_on_their_way(ferry: kvferry.Ferry, sent: list[int]) -> None:
    fill(ferry)
    sent.clear()
    keys = keys_of(ferry, 100, 20)
    ticket = ferry.store(keys, range(20))
    assert len(sent) == 2
    ferry.reset()
    assert ferry.wait(ticket, LONG).num_blocks == 20
    assert not len(ferry.match(keys))
    ferry._scheduler.check_integrity()
    assert ferry._scheduler.pool.counts.free == SLOTS


def test_close_while_both_are_on_their_way(ferry: kvferry.Ferry) -> None:
    fill(ferry)
    ferry.store(keys_of(ferry, 100, 20), range(20))
    ferry.close()


def test_nothing_makes_room_for_another_like_itself_by_going() -> None:
    pool = Pool(128, together=True)
    others, own = keys(range(126)), keys([1000, 1001])
    for each in (others, own):
        lease = pool.reserve(each)
        assert lease is not None
        lease.commit()
    assert pool.pin(others) is not None
    pool.make_spare(own)
    assert pool.cached(own).all()
    pool.check_integrity()


def test_small_stores_make_room_for_the_next_behind_themselves(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch, kv: Tensors
) -> None:
    fill(ferry)
    pool = ferry._scheduler.pool
    free: list[int] = []
    submit = ferry._rank.engine.submit

    def noting(transfer: Transfer) -> None:
        free.append(pool.num_free)
        submit(transfer)

    monkeypatch.setattr(ferry._rank.engine, "submit", noting)
    for number in range(200, 206):
        keys, before = keys_of(ferry, number, 3), [layer.copy() for layer in kv]
        evicted = pool.counts.evicted
        assert ferry.wait(ferry.store(keys, range(3)), LONG).num_blocks == 3
        assert pool.num_free == SPARE
        assert pool.counts.evicted == evicted + 3
        comes_back(ferry, kv, keys, before)
    assert free[::2] == [SPARE - 3] * 6
