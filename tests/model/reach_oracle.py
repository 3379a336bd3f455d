"""Which hits can be served, by brute force from the attention definitions. Slow on purpose.

Written before ``kvferry.cache.reach`` and without it: everything is a set of token positions,
found by asking what each query attends. Nothing here knows intervals,
cumulative sums or closed forms.

A *hit* of P tokens means: the engine computes nothing for tokens 0..P-1, its next query is at
position P. So every key below P which the query at P, or any later one, attends must come from
what is held; and a recurrent layer must find the state it had after token P-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

Kind = Literal["full", "sliding", "chunked", "state"]
Bits = Sequence[bool]


class Layer(NamedTuple):
    """One group as the oracle sees it; ``span`` is the window or the chunk, in tokens."""

    kind: Kind
    block_tokens: int
    span: int = 0


def attended(kind: Kind, span: int, position: int) -> set[int]:
    """The key positions that the query at ``position`` attends, itself included."""
    keys = set()
    for key in range(position + 1):
        if kind == "full":
            visible = True
        elif kind == "sliding":
            visible = position - key < span
        elif kind == "chunked":
            visible = key // span == position // span
        else:
            raise AssertionError("a recurrent layer attends no keys")
        if visible:
            keys.add(key)
    return keys


@cache
def needed_tokens(kind: Kind, span: int, hit: int) -> frozenset[int]:
    """The tokens below ``hit`` whose cached bytes some query at ``hit`` or later reads.

    For a recurrent layer the only bytes read are the state after the last token of the hit.
    """
    if kind == "state":
        return frozenset({hit - 1} if hit else ())
    keys: set[int] = set()
    for position in range(hit, hit + span + 2):
        keys |= attended(kind, span, position)
    return frozenset(key for key in keys if key < hit)


def has_boundary(layer: Layer, hit: int) -> bool:
    """A recurrent layer keeps its state only where a slot ends; other layers stop anywhere."""
    return layer.kind != "state" or hit % layer.block_tokens == 0


@cache
def needed_blocks(layer: Layer, hit: int, held: int) -> frozenset[int]:
    """The blocks that hold a needed token which the engine, having ``held`` tokens, lacks.

    An engine that holds a prefix of ``held`` tokens has what a query at ``held`` needs, no more.
    """
    lacking = needed_tokens(layer.kind, layer.span, hit)
    lacking -= needed_tokens(layer.kind, layer.span, held)
    return frozenset(token // layer.block_tokens for token in lacking)


@lru_cache(maxsize=1 << 16)
def servable(layer: Layer, present: tuple[bool, ...], hit: int, held: int = 0) -> bool:
    if not has_boundary(layer, hit):
        return False
    blocks = needed_blocks(layer, hit, held)
    return all(block < len(present) and present[block] for block in blocks)


def longest(
    layers: Sequence[Layer], present: Sequence[Bits], limit: int, step: int, held: int = 0
) -> int:
    """The longest hit over ``held`` that all layers serve, or ``held`` where there is none."""
    parts = [(layer, tuple(bits)) for layer, bits in zip(layers, present, strict=True)]
    for hit in range(limit, held, -1):
        if hit % step == 0 and all(servable(layer, bits, hit, held) for layer, bits in parts):
            return hit
    return held


def ever_needed(layer: Layer, block: int, step: int) -> bool:
    """Does any hit whatever, at a multiple of ``step``, read this slot?"""
    beyond = (block + 1) * layer.block_tokens + (layer.span + 1) * (step + 1)
    return any(
        block in needed_blocks(layer, hit, 0)
        for hit in range(step, beyond + 1, step)
        if has_boundary(layer, hit)
    )
