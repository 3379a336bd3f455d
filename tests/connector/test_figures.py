"""What is counted travels in intervals: added up, they are what our scheduler counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.ports import free_port
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

from kvferry.connectors.common.reports import (
    EXPORTED,
    SEPARATOR,
    Figures,
    add,
    adds_up,
    between,
    figures,
    idle_figures,
    log_line,
)
from kvferry.hints import Hints
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Snapshot
from kvferry.tools.top.scrape import fetch

BLOCK_BYTES = 2 * BLOCK_TOKENS * 8 * 4
PROMPT = 4 * BLOCK_TOKENS


@pytest.fixture
def sides(make_sides: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch) -> Sides:
    monkeypatch.setattr("kvferry.connectors.common.reports._STATS_SECONDS", 0.0)
    return make_sides(["layer0"])


def load(sides: Sides, name: str, tag: int) -> None:
    request = request_of(name, hashes_of(tag))
    sides.promise(request)
    sides.step()
    sides.end(request)
    sides.rest()


def test_intervals_add_up_to_what_was_counted(sides):
    total: Figures = {}
    for tag in range(1, 4):
        sides.end(sides.compute(f"w{tag}", hashes_of(tag)))
        sides.rest()
        load(sides, f"r{tag}", tag)
        interval = sides.side.take_stats()
        assert interval is not None
        assert interval[names.LOOKUPS.name] == 2, "of this interval alone"
        add(total, interval)
        assert sides.side.take_stats() is None, "nothing has happened since"
    line = log_line(total)
    assert line["kvferry_lookups"] == 6
    assert line["kvferry_hit_tokens"] == 3 * PROMPT
    assert line["kvferry_stored_bytes"] == line["kvferry_loaded_bytes"] == 12 * BLOCK_BYTES
    assert line["kvferry_transfers_in_flight"] == line["kvferry_failed_transfers"] == 0
    assert total[SEPARATOR.join((names.SLOT_BYTES.name, "host"))] == BLOCK_BYTES


def test_nothing_is_told_before_it_is_time(make_sides):
    sides = make_sides(["layer0"])
    running = sides.compute("runs", hashes_of(1))
    sides.side.serving._num_quiet = 0
    assert sides.side.take_stats() is not None
    sides.side.serving._num_quiet = 0
    sides.side.match(request_of("new", hashes_of(2)), 0)
    assert sides.side.take_stats() is None, "told a moment ago, and there are more steps to come"
    sides.side.finished(request_of("new", hashes_of(2)))
    sides.end(running)
    sides.rest()
    assert sides.side.take_stats() is not None, "for long there may be no other step"


def test_a_gauge_is_the_latest_and_a_counter_what_came_since():
    counter, gauge = names.LOOKUPS.name, names.QUEUED.name
    before, now = {counter: 5.0, gauge: 5.0}, {counter: 8.0, gauge: 3.0}
    assert between(before, now) == {counter: 3.0, gauge: 3.0}
    add(before, {counter: 1.0, gauge: 1.0})
    assert before == {counter: 6.0, gauge: 1.0}
    assert not adds_up("of somebody else")


def test_idle_is_a_gauge_for_every_reason():
    told = idle_figures("failed", "no\nroom")
    idle = {key: value for key, value in told.items() if key.startswith(names.IDLE.name)}
    assert idle == {
        f"kvferry_idle{SEPARATOR}refused": 0.0,
        f"kvferry_idle{SEPARATOR}failed": 1.0,
        f"kvferry_idle_info{SEPARATOR}no room": 1.0,
    }
    assert not any(map(adds_up, told))


@pytest.mark.parametrize("tenant", ["a|b", "a|b|c|d", "|", 'a"b', "a\\b", "a,b"])
def test_a_tenants_name_is_one_label_whatever_its_sender_puts_into_it(tenant):
    """Seen red with a separator that a name may contain: vLLM's front end raised at it."""
    desk = Desk(slots=16, tenants="*")
    request = desk.scheduler.open("r", story(1, 2), Hints(tenant=tenant))
    request.match()
    request.end()
    told = figures(Snapshot(desk.scheduler.stats(), "1.0"))
    (key,) = [key for key in told if key.startswith(names.TENANT_LOOKUPS.name) and told[key]]
    name, *labels = key.split(SEPARATOR)
    assert name == names.TENANT_LOOKUPS.name
    assert labels == [tenant]
    for key in told:
        name, *labels = key.split(SEPARATOR)
        assert len(labels) == len(EXPORTED[name].labels)


def test_a_question_from_another_thread_changes_nothing(make_sides):
    """Seen red: a scrape counted misses, and went on with rests, beside the engine's thread."""
    sides = make_sides(["layer0"], metrics_port=free_port())
    serving = sides.side.serving
    sides.side.match(request_of("a", hashes_of(1)), 0)
    waiting = len(serving.scheduler.book.events)
    assert waiting
    source = serving.reports._endpoint._source  # the engine does not come by: it looks itself
    assert source.snapshot().stats.queries == 0
    assert source.recent() == []
    assert source.explain("a") is None
    assert len(serving.scheduler.book.events) == waiting
    sides.side.close()
    assert not len(serving.scheduler.book.events)
    assert serving.scheduler.onlooker.stats().queries == 1


@pytest.mark.parametrize("port", ["auto", None])
def test_a_server_serves_its_metrics_on_a_free_port_unless_told_not_to(make_sides, caplog, port):
    with caplog.at_level(logging.INFO):
        made = [make_sides(["layer0"], metrics_port=port) for _ in range(2)]
    first, second = [sides.side.serving.reports._endpoint for sides in made]
    if port is None:
        assert first is second is None
        return
    assert DEFAULT_PORT <= first.port < second.port
    words = f"serves its metrics at {second.url}, because port {DEFAULT_PORT} is taken"
    assert words in caplog.text
    assert b"kvferry_lookups_total 0" in fetch(f"{second.url}metrics")
