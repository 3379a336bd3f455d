"""``kvferry.cache.reach`` against the brute-force oracle: every small case, and random larger ones.

Each exhaustive test states how many cases it compared, and fails if that number changes:
538,517 in all.

Mutations of ``reach.py`` that were tried; each one made a test of this module fail. Try them again
when you change either file.

- ``SlidingWindow.first_token``: ``- self.window``; ``- (self.window - 2)``
- ``ChunkedLocal.first_token``: the chunk of the last cached token instead of the query's
- ``RecurrentState.stop_tokens``: 1 (a state in the middle of a slot)
- ``_cut``: no ``np.where`` (an empty read charged a slot); ``lengths // block_tokens`` (the ragged
  last slot forgotten); ``0`` for ``computed_tokens``
- ``needed``: ``>`` for ``>=``; ``0`` for ``computed_tokens``
- ``longest_hit``: ``hits[0]``; ``start - 1`` for the next look; ``high`` for ``high + 1``; ``=``
  for ``&=``; ``low = 0``; ``high * step`` without the ``max``
- ``_servable``: slots past the end taken as present
- ``_prefix_tokens``: no look at ``rest[run]``; the slot the engine's tokens end in skipped
- ``_hit_step``: ``alignment`` without the ``lcm``; ``max`` for the ``lcm`` of blocks
- ``can_serve``: rounding ``end`` down; ``num_slots - 1``; lengths up to ``num_tokens`` alone
- ``_covered``: ``> 1``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model import reach_oracle as oracle
from tests.model.reach_oracle import Layer

from kvferry.cache import reach
from kvferry.errors import InputError

SIZES = (1, 2, 3, 4)
BLOCK_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18, 21, 24, 27)
KINDS: tuple[tuple[oracle.Kind, int], ...] = (
    ("full", 0),
    *(("sliding", window) for window in range(1, 13)),
    *(("chunked", chunk) for chunk in range(1, 9)),
    ("state", 0),
)
FEW_KINDS: tuple[tuple[oracle.Kind, int], ...] = (
    ("full", 0),
    ("sliding", 2),
    ("sliding", 3),
    ("sliding", 5),
    ("chunked", 2),
    ("chunked", 5),
    ("state", 0),
)
LARGE_KINDS: tuple[tuple[oracle.Kind, int], ...] = (
    ("full", 0),
    *(("sliding", window) for window in (1, 2, 7, 16, 33)),
    *(("chunked", chunk) for chunk in (1, 2, 7, 16, 33)),
    ("state", 0),
)


@cache
def group_of(layer: Layer) -> reach.Group:
    kind, tokens, span = layer
    if kind == "full":
        return reach.FullAttention(tokens)
    if kind == "sliding":
        return reach.SlidingWindow(tokens, window=span)
    if kind == "chunked":
        return reach.ChunkedLocal(tokens, chunk=span)
    return reach.RecurrentState(tokens)


def layers_of(kinds: Iterable[tuple[oracle.Kind, int]], size: int) -> list[Layer]:
    return [Layer(kind, size, span) for kind, span in kinds]


def bitmaps(num_slots: int) -> Iterator[tuple[bool, ...]]:
    return product((False, True), repeat=num_slots)


@lru_cache(maxsize=1 << 12)
def _mask(bits: tuple[bool, ...]) -> reach.BoolArray:
    mask = np.array(bits, dtype=np.bool_)
    mask.flags.writeable = False  # it is handed out again
    return mask


def as_mask(bits: Sequence[bool]) -> reach.BoolArray:
    return _mask(tuple(bits))


@pytest.fixture
def _first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases would end in the first look; a narrow one makes them walk on to further looks."""
    monkeypatch.setattr(reach, "_FIRST_LOOK", 1)


def check_longest(
    layers: Sequence[Layer],
    present: Sequence[Sequence[bool]],
    limit: int,
    step: int | None,
    held: int = 0,
) -> None:
    groups = [group_of(layer) for layer in layers]
    got = reach.longest_hit(
        groups, [as_mask(p) for p in present], limit, alignment=step, computed_tokens=held
    )
    asked = lcm(*(layer.block_tokens for layer in layers)) if step is None else step
    want = oracle.longest(layers, present, limit, asked, held)
    assert got == want, (layers, present, limit, step, held)


def test_one_group_with_every_bitmap_up_to_eight_slots() -> None:
    cases = 0
    for size in SIZES:
        for layer in layers_of(KINDS, size):
            for num_slots in range(9):
                for bits in bitmaps(num_slots):
                    check_longest([layer], [bits], num_slots * size + 1, None)
                    cases += 1
    assert cases == 44_968


@pytest.mark.usefixtures("_first_look")
def test_one_group_with_every_limit_start_and_alignment() -> None:
    cases = 0
    for size, step in product(SIZES, (1, 2, 3)):
        for layer in layers_of(KINDS, size):
            for bits in bitmaps(3):
                for limit in range(3 * size + 2):
                    for held in range(limit + 2):
                        check_longest([layer], [bits], limit, step, held)
                        cases += 1
    assert cases == 137_280


@pytest.mark.parametrize(("step", "most"), [(None, 12), (1, 9), (5, 9)])
def test_two_groups_of_mixed_sizes_with_every_bitmap(step: int | None, most: int) -> None:
    cases = 0
    for sizes, whole in (((2, 3), 12), ((2, 4), 12), ((4, 3), 12), ((1, 2), 6), ((3, 3), 9)):
        tokens = min(whole, most)
        for one, two in product(layers_of(FEW_KINDS, sizes[0]), layers_of(FEW_KINDS, sizes[1])):
            for first in bitmaps(tokens // sizes[0]):
                for second in bitmaps(tokens // sizes[1]):
                    check_longest([one, two], [first, second], tokens, step)
                    cases += 1
    assert cases == {12: 109_760, 9: 39_200}[most]


@pytest.mark.parametrize(("step", "third_size"), [(None, 4), (1, 3)])
def test_three_groups_with_every_bitmap(
    step: int | None, third_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_FIRST_LOOK", 2)
    cases = 0
    kinds = (*FEW_KINDS[:2], *FEW_KINDS[3:4], *FEW_KINDS[5:])
    for one, two, three in product(
        layers_of(kinds, 4), layers_of(kinds, 2), layers_of(kinds, third_size)
    ):
        for present in product(bitmaps(2), bitmaps(4), bitmaps(2)):
            check_longest([one, two, three], present, 8, step)
            cases += 1
    assert cases == 32_000


def test_needed_blocks() -> None:
    cases = 0
    for (kind, span), size in product(KINDS, (*SIZES, 6, 8, 9, 12)):
        layer = Layer(kind, size, span)
        group = group_of(layer)
        for hit in range(32):
            if not oracle.has_boundary(layer, hit):
                with pytest.raises(InputError):
                    reach.needed(group, hit)
                continue
            for held in range(hit + 1):
                got = reach.needed(group, hit, computed_tokens=held)
                want = sorted(oracle.needed_blocks(layer, hit, held))
                assert list(got) == want, (layer, hit, held)
                cases += 1
    assert cases == 90_029


def test_can_serve_for_every_alignment() -> None:
    cases = 0
    for size, step in product(SIZES, range(1, 17)):
        for layer in layers_of(KINDS, size):
            (mask,) = reach.can_serve([group_of(layer)], 11 * size - 1, alignment=step)
            want = [oracle.ever_needed(layer, slot, step) for slot in range(len(mask))]
            assert mask.tolist() == want, (layer, step)
            cases += len(mask)
    assert cases == 14_080


@pytest.mark.parametrize("step", [1, 3, 4])
def test_can_serve_two_groups(step: int) -> None:
    """A hit ends where both groups can stop."""
    for layers in product(layers_of(FEW_KINDS, 2), layers_of(FEW_KINDS, 3)):
        states = [layer.block_tokens for layer in layers if layer.kind == "state"]
        masks = reach.can_serve([group_of(layer) for layer in layers], 24, alignment=step)
        for layer, mask in zip(layers, masks, strict=True):
            want = [oracle.ever_needed(layer, n, lcm(step, *states)) for n in range(len(mask))]
            assert mask.tolist() == want, (layers, layer, step)


@st.composite
def runs(draw: st.DrawFn, max_slots: int) -> list[bool]:
    """Presence as a pool would have it: long runs, a few gaps."""
    lengths = draw(st.lists(st.integers(1, max_slots), max_size=8))
    here = draw(st.booleans())
    bits: list[bool] = []
    for length in lengths:
        bits += [here] * length
        here = not here
    return bits[:max_slots]


@st.composite
def models(draw: st.DrawFn) -> list[tuple[Layer, list[bool]]]:
    """One to four groups of any kind and size over about 400 tokens, and what each has."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        kind, span = draw(st.sampled_from(LARGE_KINDS))
        layer = Layer(kind, draw(st.sampled_from(BLOCK_SIZES)), span)
        parts.append((layer, draw(runs(400 // layer.block_tokens))))
    return parts


@settings(max_examples=500, deadline=None)
@given(models(), st.integers(0, 400), st.integers(1, 24), st.integers(0, 100))
def test_larger_models_agree(
    parts: list[tuple[Layer, list[bool]]], limit: int, step: int, held: int
) -> None:
    layers, present = [layer for layer, _ in parts], [bits for _, bits in parts]
    check_longest(layers, present, limit, step, held)
    check_longest(layers, present, limit, None)
