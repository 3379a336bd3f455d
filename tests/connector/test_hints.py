"""What a client says of a request, through the connector: `do_not_store`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

PROBES = itertools.count()


def serve(sides: Sides, name: str, tag: int, hints: dict[str, Any] | None = None) -> None:
    """A whole life: it comes, finds nothing, computes its prompt, ends."""
    said: dict[str, Any] = {} if hints is None else {"kv_transfer_params": {"kvferry": hints}}
    sides.end(sides.compute(name, hashes_of(tag), **said))
    sides.rest()


def num_stored(sides: Sides, tag: int) -> int:
    """Leading blocks of it that another request would be told of."""
    probe = request_of(f"probe{next(PROBES)}", hashes_of(tag))
    found, _ = sides.side.match(probe, 0)
    sides.side.finished(probe)
    return int(found or 0) // BLOCK_TOKENS


@pytest.mark.parametrize(
    ("hints", "expected"),
    [(None, 4), ({"do_not_store": True}, 0), ({"max_store_tokens": 2 * BLOCK_TOKENS}, 2)],
)
def test_as_much_is_stored_as_may_be(
    make_sides: Callable[..., Sides],
    hints: dict[str, Any] | None,
    expected: int,
) -> None:
    sides = make_sides(["layer0"])
    serve(sides, "said", 1, hints)
    for number in range(12):  # vLLM gives away everything it has, and shows it to us before
        serve(sides, f"other{number}", 10 + number)
    assert num_stored(sides, 1) == expected
    assert num_stored(sides, 10) == 4
    assert not sides.side.guard.broken
