"""A store that is asked now and then whether it answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault
from kvferry.tiers.remote.health import StoreHealth

AWAY, NO = Fault("away"), Fault("no")
Answer = Exception | Fault | None


class Probed:
    """A client whose probes end as they are told to, and well where they are told nothing."""

    def __init__(self, **answers: list[Answer]) -> None:
        self.answers = answers

    async def probe(self, way: Way) -> Fault | None:
        left = self.answers.get(way.value, [])
        answer = left.pop(0) if left else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        # Seen red with probes that may raise: the store was never asked again.
        (
            {"read": [UnicodeError("label empty"), AWAY]},
            [("read", "UnicodeError: label empty"), ("read", "away"), ("read", "")],
        ),
        # Seen red where answers were enough: a store may look up, and give nothing back.
        (
            {"read": [AWAY], "write": [NO]},
            [("read", "away"), ("write", "no"), ("read", "no"), ("read", "")],
        ),
        ({}, []),
    ],
)
def test_a_store_can_be_read_once_it_gives_back_what_it_takes(
    answers: dict[str, list[Answer]], told: list[tuple[str, str]]
) -> None:
    """One that takes nothing is read again by the next probe."""
    heard: list[tuple[str, str]] = []
    health = StoreHealth(
        cast(Any, Probed(**answers)), lambda way, ailment: heard.append((way.value, ailment))
    )

    async def three() -> None:
        for _ in range(3):
            await health.probe(Way.READ)

    asyncio.run(three())
    assert heard == told
