"""What each kind of group needs, said with the numbers of real models."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.cache.reach import (
    BoolArray,
    ChunkedLocal,
    FullAttention,
    Group,
    RecurrentState,
    SlidingWindow,
    longest_hit,
    needed,
)
from kvferry.errors import InputError


def mask(bits: str) -> BoolArray:
    """Presence as a drawing: ``#`` is there, ``.`` is not."""
    return np.array([bit == "#" for bit in bits], dtype=np.bool_)


def test_the_masks_given_are_not_changed() -> None:
    present = mask("##.#")
    present.setflags(write=False)
    longest_hit([SlidingWindow(16, window=20)], [present], 64)
    assert present.tolist() == mask("##.#").tolist()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: FullAttention(0), "block_tokens must be at least 1, got 0"),
        (lambda: SlidingWindow(16, window=0), "window must be at least 1, got 0"),
        (lambda: ChunkedLocal(16, chunk=-8), "chunk must be at least 1, got -8"),
        (lambda: needed(FullAttention(16), -1), "num_tokens must be at least 0, got -1"),
        (
            lambda: needed(FullAttention(16), 1, computed_tokens=-2),
            "computed_tokens must be at least 0",
        ),
        (lambda: longest_hit([], [], 1), "no groups given"),
        (lambda: longest_hit([FullAttention(16)], [], 1), "0 slot masks for 1 groups"),
        (
            lambda: longest_hit([FullAttention(16)], [mask("#")], -1),
            "max_tokens must be at least 0",
        ),
        (lambda: longest_hit([FullAttention(16)], [mask("#")], 1, alignment=0), "alignment must"),
        (
            lambda: longest_hit([FullAttention(16)], [np.ones(3)], 1),  # type: ignore[list-item]
            r"group 0 must be a vector of booleans, got float64 of shape \(3,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        wrong()


def test_cost_for_8192_slots() -> None:
    """Next to a loop over as many slots in the same run; the best of 30 each, whatever pauses.

    Measured on a 2-core machine, CPython 3.11, numpy 2.4, 2026-11-15: full attention
    alone 4 µs; four kinds all present 50 µs; the worst case below 420 µs.
    """
    slots = 8192
    groups: list[Group] = [
        FullAttention(16),
        SlidingWindow(16, window=4096),
        ChunkedLocal(16, chunk=8192),
        RecurrentState(16),
    ]
    here, nowhere = np.ones(slots, dtype=np.bool_), np.zeros(slots, dtype=np.bool_)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(30):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    def cost(groups: list[Group], *present: BoolArray) -> float:
        return best(lambda: longest_hit(groups, present, slots * 16 - 1))

    loop = best(lambda: [slot for slot in range(slots) if not slot < 0])
    assert cost(groups[:1], here) < loop / 4
    assert cost(groups, *[here] * 4) < 3 * loop
    assert cost(groups, here, nowhere, nowhere, nowhere) < 16 * loop
