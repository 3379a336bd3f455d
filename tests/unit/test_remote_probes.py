"""A store that is asked now and then whether it answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from kvferry.tiers.remote.bandwidth import Bandwidth
from kvferry.tiers.remote.breaker import Breaker
from kvferry.tiers.remote.carrier import Carrier
from kvferry.tiers.remote.client import Fault
from kvferry.tiers.remote.names import Whose


def test_a_probe_that_raises_is_one_that_failed_and_the_next_is_made() -> None:
    """Seen red with probes that may raise: the store was never asked again."""
    answers: list[Exception | Fault | None] = [UnicodeError("label empty"), Fault("away"), None]
    told: list[str] = []

    async def probe() -> Fault | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = cast(Any, SimpleNamespace(staging=None, num_calls=1, probe=probe))
    whose = Whose(bytes(32), 64)
    carrier = Carrier(client, whose, cast(Any, None), None, Bandwidth(None), Breaker(), told.append)

    async def three_probes() -> None:
        for _ in range(3):
            await carrier._probe(60.0)

    asyncio.run(three_probes())
    assert told[0] == "UnicodeError: label empty"
    assert told[-1] == ""
    assert not answers
