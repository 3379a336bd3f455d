"""``attach`` with groups: what it refuses before anything is opened, and whose bytes come back."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.cache.reach import FullAttention, Group, RecurrentState, SlidingWindow
from kvferry.errors import KvferryError

NUM_BLOCKS = 64


def tensors(num_groups: int) -> list[list[np.ndarray[Any, Any]]]:
    return [[np.zeros((NUM_BLOCKS, 64), np.uint8)] for _ in range(num_groups)]


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([FullAttention(32)], "block_tokens=32"),
        ([FullAttention(24), FullAttention(16)], "24"),
        (["full"], "str"),
        (FullAttention(16), "FullAttention"),
        ([], "at least one"),
    ],
    ids=["one of other blocks", "no multiple", "no group", "no list", "none"],
)
def test_groups_that_do_not_fit_are_refused_and_nothing_is_opened(groups: Any, what: str) -> None:
    """Seen red: a load of two blocks filled one and said ok; two threads were left behind."""
    before = threading.active_count()
    num_groups = len(groups) if isinstance(groups, list) else 1
    with pytest.raises(KvferryError, match=what):
        kvferry.attach(
            tensors(num_groups), model="m", groups=groups, block_tokens=16, host="1MiB"
        ).close()
    assert threading.active_count() == before


SHAPES: dict[str, list[Group]] = {
    "full": [FullAttention(16)],
    "two sizes": [FullAttention(32), FullAttention(16)],
    "a window": [FullAttention(16), SlidingWindow(16, window=40)],
    "a window alone": [SlidingWindow(16, window=40)],
    "a state": [FullAttention(16), RecurrentState(32)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_that_is_loaded_has_the_bytes_of_its_tokens(shape: str) -> None:
    groups = SHAPES[shape]
    rng = random.Random(shape)
    kv = tensors(len(groups))
    num_loaded = 0
    with kvferry.attach(
        kv, model="m", groups=groups, block_tokens=16, host="16KiB", load_policy="always"
    ) as ferry:
        for _ in range(150):
            story = [rng.randrange(3)] * 16 + [rng.randrange(2)] * 64 + [rng.randrange(2)] * 80
            tokens = story[: rng.randrange(len(story) + 1)]
            keys = ferry.keys(tokens)
            tables = [_table(group, len(tokens), rng) for group in groups]
            hit = ferry.match(keys, on_device=rng.randrange(len(keys) + 1))
            needed = hit.needed
            given = _given(tables, hit.on_device, hit.on_device + len(hit))
            for layers in kv:
                layers[0].fill(255)
            assert ferry.wait(ferry.load(hit, given), 60).ok
            for g, group in enumerate(groups):
                for place in needed[g]:
                    num_loaded += 1
                    assert kv[g][0][tables[g][place], 0] == _mark(g, group, tokens, place)
            for g, group in enumerate(groups):
                for place, block in enumerate(tables[g]):
                    kv[g][0][block] = _mark(g, group, tokens, place)
            first = rng.choice([0, hit.on_device]) if len(groups) == 1 else 0
            assert ferry.wait(ferry.store(keys, _given(tables, first, len(keys)), first=first)).ok
            ferry._scheduler.check_integrity()
        assert ferry._scheduler.requests == ()
    assert num_loaded > 100


def _table(group: Group, num_tokens: int, rng: random.Random) -> list[int]:
    return rng.sample(range(NUM_BLOCKS), num_tokens // group.block_tokens)


def _given(tables: list[list[int]], first: int, stop: int) -> Any:
    """One group alone is given without what comes before."""
    return tables[0][first:stop] if len(tables) == 1 else tables


def _mark(g: int, group: Group, tokens: list[int], place: int) -> int:
    """What a block holds: other tokens, place or group, another mark (nearly always)."""
    return hash((g, place, tuple(tokens[: (place + 1) * group.block_tokens]))) % 251
