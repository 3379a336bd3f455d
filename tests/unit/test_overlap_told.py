"""How a load went together with the forward pass is remembered, served, read and shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tests.fakes.desk import Desk, story

from kvferry.cache.policies.load_or_compute import OverlapDecision, Overlapping
from kvferry.telemetry.source import plain
from kvferry.tools.cli.explain import put_explained


def loaded(overlap: OverlapDecision | None) -> Desk:
    """A request has loaded its hit, after this decision."""
    desk = Desk()
    desk.keep("writer", story(1, 4), 16)
    request = desk.scheduler.open("reader", story(1, 4))
    assert request.match().num_tokens == 16
    assert request.load([list(range(20, 24))], overlap)
    return desk


@pytest.mark.parametrize("is_decided", [False, True])
def test_it_is_told(is_decided: bool) -> None:
    overlap = Overlapping("auto").decide(0.012, has_others=False) if is_decided else None
    desk = loaded(overlap)
    stats = desk.scheduler.stats()
    assert stats.overlaps == ({"alone": 1} if is_decided else {})
    (transfer,) = desk.scheduler.plan().transfers
    assert transfer.in_parts == is_decided
    entry = desk.scheduler.onlooker.journal("reader")
    assert entry is not None
    served = {**plain("reader", entry), "others": []}
    out = io.StringIO()
    put_explained(json.loads(json.dumps(served)), Console(file=out, width=200))
    words = "Overlap with the forward pass: alone: 12.0 ms to load"
    assert (words in out.getvalue()) == is_decided
