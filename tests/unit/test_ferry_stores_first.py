"""A store is on its way before its keys are written down, and written down when it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.types import Transfer

BLOCKS, TOKENS, LAYERS = 12, 4, 3


@pytest.fixture
def kv() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng()
    return [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(LAYERS)]


@pytest.fixture
def ferry(kv: list[np.ndarray[Any, Any]]) -> Iterator[kvferry.Ferry]:
    host = str(8 * LAYERS * 2 * TOKENS * 8)
    with kvferry.attach(kv, model="m", block_tokens=TOKENS, host=host, memory_curve="off") as ferry:
        yield ferry


def watch(ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys the pool knows whenever a copy is submitted."""
    engine, index = ferry._rank.engine, ferry._scheduler.pool._index
    submit = engine.submit
    seen: list[int] = []

    def noting(transfer: Transfer) -> None:
        seen.append(len(index))
        submit(transfer)

    monkeypatch.setattr(engine, "submit", noting)
    return seen


def test_a_store_is_submitted_before_its_keys_are_written_down(
    ferry: kvferry.Ferry, kv: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, pool = watch(ferry, monkeypatch), ferry._scheduler.pool
    for number in range(5):  # the later ones evict
        keys = ferry.keys(range(100 * number, 100 * number + 5 * TOKENS))
        blocks = np.random.default_rng().permutation(BLOCKS)[:5]
        before = [layer[blocks].copy() for layer in kv]
        done = ferry.wait(ferry.store(keys, blocks), 30)
        assert done.num_blocks == 5
        pool.check_integrity()
        for layer in kv:
            layer[blocks] = 0xEE
        ferry.wait(ferry.load(ferry.match(keys), blocks), 30)
        for layer, bytes_before in zip(kv, before, strict=True):
            assert np.array_equal(layer[blocks], bytes_before)
    stores, loads = seen[::2], seen[1::2]
    assert all(stored < loaded for stored, loaded in zip(stores, loads, strict=True))
    assert stores[0] == 0
    assert loads[0] == 5


def test_what_is_left_out_is_told_by_what_was_written(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(ferry, monkeypatch)
    keys = ferry.keys(range(10 * TOKENS))
    ticket = ferry.store(keys, range(10))
    done = ferry.wait(ticket, 30)
    assert done.num_blocks == 8
    assert "blocks 8 to 9" in done.reason
    assert seen == [8]
    ferry._scheduler.pool.check_integrity()


def test_a_store_that_is_refused_leaves_nothing_owed(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Transfer) -> None:
        raise OSError("no")

    monkeypatch.setattr(ferry._rank.engine, "submit", refuse)
    keys = ferry.keys(range(5 * TOKENS))
    done = ferry.wait(ferry.store(keys, range(5)), 30)
    assert not done.ok
    assert done.num_blocks == 0
    pool = ferry._scheduler.pool
    pool.check_integrity()
    assert pool.counts.free == 8
    assert not len(ferry.match(keys))
