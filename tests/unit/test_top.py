"""Watching: what is read off an endpoint, and the rates made of it."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from tests.fakes.endpoint import FakeEndpoint, stats

from kvferry.connectors.common.reports import SEPARATOR, idle_figures
from kvferry.errors import UnreachableError
from kvferry.telemetry.catalog import IDLE, IDLE_INFO, INFO, Snapshot, exposition, installed_version
from kvferry.telemetry.http import HttpServer
from kvferry.tiers.disk.protocol import DiskFigures
from kvferry.tools.top import scrape
from kvferry.tools.top.scrape import explain, parse, read
from kvferry.tools.top.view import Watch


@pytest.fixture
def endpoint():
    fake = FakeEndpoint()
    yield fake
    fake.close()


def at(second: float, *, queries: int, moved: int):
    snapshot = Snapshot(stats(queries=queries, moved=moved), "1", {"host": 1_000_000})
    text = exposition(snapshot).decode()
    return parse(text, at=second)


def watch_over(*readings) -> Watch:
    left = list(readings)
    return Watch("u", look=lambda url: left.pop(0), explain=lambda url: {"requests": []})


def test_rates_are_between_two_looks():
    watch = watch_over(at(0, queries=10, moved=10), at(2, queries=20, moved=30))
    first = watch.look()
    assert first.queries_per_second == 0
    assert first.hit_rate == pytest.approx(0.75)
    assert first.hit_rate_now is None
    view = watch.look()
    assert view.queries_per_second == 5
    assert view.hit_rate_now == pytest.approx(0.75)
    down, up = view.routes
    assert (down.src, down.dst, up.src, up.dst) == ("device", "host", "host", "device")
    assert up.bytes_per_second == pytest.approx(20 * 100_000_000 / 2)
    assert up.copy_speed == pytest.approx(50e9)
    assert up.paths == {"kernel": 3e9}
    assert view.misses == {"evicted": 60, "never_stored": 20}
    host, disk = view.tiers
    assert (host.cached, host.leased, host.total, host.slot_bytes) == (600, 100, 1000, 1_000_000)
    assert (disk.total, disk.slot_bytes) == (10000, None)
    assert view.problems["failed copies"] == 1
    assert (view.in_flight, view.queued, view.leases) == (3, 4, 7)


def test_tiers_are_tiers_with_what_they_were_asked_for_and_why_they_are_away(endpoint):
    counted = replace(
        stats(queries=1), ailments={"disk": "rank 1: full", "store": ""}, asked={"store": (8, 3)}
    )
    endpoint.show(Snapshot(counted, "1.2.3", {"host": 1_000_000, "disk": 1_000_000}))
    endpoint.tiers_away = {"disk": "rank 1: full"}
    host, disk, store = Watch(endpoint.url).look().tiers
    assert (host.name, host.is_away, host.asked) == ("host", False, None)
    assert (disk.is_away, disk.why_away, disk.total) == (True, "rank 1: full", 10_000)
    assert (store.name, store.asked, store.found, store.total) == ("store", 8, 3, 0)
    assert not store.is_away
    endpoint.show_as_vllm(Snapshot(counted, "1.2.3"))  # which has no word for the reason
    tiers = {tier.name: tier for tier in Watch(endpoint.url).look().tiers}
    assert tiers["disk"].is_away
    assert not tiers["store"].is_away
    assert tiers["store"].asked == 16


def test_drives_say_what_fails_and_what_is_not_durable(endpoint):
    counted = replace(stats(queries=1), restored={"disk": 120})
    disk = DiskFigures(1000, 5000, failed={"damaged": 2}, pending=3, durable_lag=0.25, restarts=1)
    endpoint.show(Snapshot(counted, "1", disks={"disk": disk}))
    tier = {tier.name: tier for tier in Watch(endpoint.url).look().tiers}["disk"]
    assert (tier.restored, tier.failed, tier.pending) == (120, {"damaged": 2}, 3)


def test_all_that_an_idle_connector_tells_is_enough_for_a_view(endpoint):
    """It never had a scheduler, so there is nothing else on vLLM's endpoint."""
    lines = []
    kinds = {INFO.name: "version", IDLE.name: "reason", IDLE_INFO.name: "why"}
    for key, value in idle_figures("refused", "prefix caching is off").items():
        name, label = key.split(SEPARATOR)
        kind = kinds[name]
        lines.append(f'vllm:{name}{{engine="0",model_name="m",{kind}="{label}"}} {value}')
    endpoint.text, endpoint.requests = "\n".join(lines) + "\n", None
    view = Watch(endpoint.url).look()
    assert view.idle == "prefix caching is off"
    assert view.version == installed_version()
    assert (view.queries, view.tiers, view.recent) == (0, [], [])


def test_an_engine_that_starts_again_starts_a_new_history():
    watch = watch_over(at(0, queries=100, moved=9), at(1, queries=1, moved=1))
    watch.look()
    view = watch.look()
    assert view.queries == 1
    assert view.queries_per_second == 0
    assert view.hit_rate_now is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm:num_requests_running 3\n", "has no kvferry metrics"),
        ("", "has no kvferry metrics"),
        ("<html>kvferry_ and nothing else</html>", "does not speak the Prometheus format"),
    ],
)
def test_an_endpoint_that_is_not_ours_is_named(endpoint, text, words):
    endpoint.text = text
    with pytest.raises(UnreachableError, match=words):
        read(endpoint.url)


def test_of_vllms_engines_sizes_and_rates_are_not_added_up(endpoint):
    endpoint.show_as_vllm(Snapshot(stats(queries=10, moved=10), "", {"host": 4096}, 1 << 20))
    view = Watch(endpoint.url).look()
    assert (view.tiers[0].slot_bytes, view.load_rate, view.prefill_rate) == (4096, 50e9, 20_000)
    assert view.pinned_bytes == 2 << 20


@pytest.mark.parametrize("request_id", [None, "cmpl-1"])
def test_an_endpoint_that_explains_nothing_says_where_to_ask(request_id):
    server = HttpServer(lambda path: None)  # as vLLM's: no such page
    try:
        with pytest.raises(UnreachableError, match="only kvferry's own endpoint explains"):
            explain(server.url, request_id)
    finally:
        server.close()


def test_a_vllm_before_its_first_request_is_loaded(endpoint):
    """Seen red: a healthy server "has no kvferry metrics" until it had a request."""
    endpoint.text = "# HELP vllm:kvferry_lookups_total Requests looked up.\n"
    endpoint.requests = None
    view = Watch(endpoint.url).look()
    assert (view.queries, view.hit_rate, view.idle) == (0, None, "")


def test_hits_are_told_apart_by_the_tier_that_had_them(endpoint):
    counted = replace(
        stats(queries=10), tier_hit_tokens={"device": 2000, "host": 1500, "disk": 6000}
    )
    endpoint.show(Snapshot(counted, "1"))
    view = Watch(endpoint.url).look()
    assert view.tokens == {"device": 2000, "host": 1500, "disk": 6000, "computed": 2500}
    assert view.hit_rate == pytest.approx(9500 / 12_000)


def test_the_usual_addresses_are_tried_and_what_answers_is_named(endpoint, monkeypatch):
    port = urlsplit(endpoint.url).port
    monkeypatch.setattr(scrape, "OWN_PORTS", range(port, port + 1))
    monkeypatch.setattr(scrape, "VLLM_PORT", port)
    assert scrape.find_endpoints() == [f"http://127.0.0.1:{port}"]
    endpoint.text = "vllm:num_requests_running 3\n"
    with pytest.raises(UnreachableError, match=rf"no kvferry found .*{port}/metrics answers, but"):
        scrape.find_endpoints()
