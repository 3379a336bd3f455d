"""Whether a load overlaps with the forward pass is remembered, served and shown."""

from __future__ import annotations

import pytest
from tests.fakes.desk import Desk, story

from kvferry.telemetry.source import entry_as_data


@pytest.mark.parametrize("in_parts", [False, True])
def test_it_is_told(in_parts: bool) -> None:
    desk = Desk()
    desk.keep("writer", story(1, 4), 16)
    request = desk.scheduler.open("reader", story(1, 4))
    assert request.match().num_tokens == 16
    assert request.load([list(range(20, 24))], in_parts=in_parts)
    (transfer,) = desk.scheduler.plan().transfers
    assert transfer.in_parts == in_parts
    desk.scheduler.stats()  # what waits in the event log is counted
    entry = desk.scheduler.onlooker.journal("reader")
    assert entry is not None
    assert entry_as_data("reader", entry)["overlaps"] == in_parts
