"""Metrics: the page equals the code, every name has a value, no label can grow without bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.by_name import ByName
from tests.fakes.metrics_page import page

from kvferry.cache.policies.load_or_compute import Verdict
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.tenants import TenantCounts
from kvferry.core.identity import Namespace, chain
from kvferry.scheduler.journal import Reason
from kvferry.scheduler.tier import SlotTier
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import (
    Snapshot,
    catalog,
    exposition,
    samples,
)
from kvferry.telemetry.source import Mailbox, Source
from kvferry.telemetry.stats import Traffic
from kvferry.tiers.disk.protocol import FAILURES, DiskFigures
from kvferry.types import FIRST_RANK, Outcome, Receipt, TierName

ROOT = Path(__file__).parents[2]
NAMESPACE = Namespace(model="m", dtype="float32", layout="test", geometry="g", block_tokens=4)


def busy_scheduler() -> ByName:
    """One that has stored, matched and loaded a request, and missed another."""
    tier = SlotTier(TierName("disk"), Pool(8))
    scheduler = ByName(Pool(8), (FullAttention(4),), tiers=(tier,), block_bytes=(100,))
    keys = chain(NAMESPACE, np.arange(16))
    scheduler.store("writer", keys, ((0, 1, 2, 3),), 16)
    settle(scheduler, path="staged", seconds=0.002)
    scheduler.match("reader", keys)
    scheduler.load("reader", ((4, 5, 6, 7),))
    settle(scheduler, path="kernel", seconds=0.001)
    most: Any = np.int64(16)  # seen red: an engine that counts in numpy broke the metrics
    scheduler.match("stranger", chain(NAMESPACE, np.arange(100, 116)), max_tokens=most)
    return scheduler


def settle(scheduler: ByName, *, path: str, seconds: float) -> None:
    plan = scheduler.plan()
    scheduler.settle(
        Receipt(t.id, FIRST_RANK, Outcome.OK, "", 100 * len(t), seconds, path)
        for t in plan.transfers
    )


DISK = DiskFigures(
    read_bytes=3000,
    written_bytes=4000,
    read_seconds=0.5,
    write_seconds=0.25,
    failed={"damaged": 2, "late": 1},
    pending=7,
    durable_lag=0.5,
    restarts=1,
    drives_away=1,
)


@pytest.fixture
def snapshot() -> Snapshot:
    tenants = {"none": TenantCounts(1, 2, 3, {"host": 4}, {"host": 0})}
    tenants["search"] = TenantCounts(5, 6, 7, {"host": 8, "disk": 9}, {"host": 1, "disk": 2})
    stats = replace(busy_scheduler().stats(), asked={"store": (4, 3)}, refused={"store": 2})
    stats = replace(stats, tenants=tenants)
    disks = {"disk": DISK}
    return Snapshot(stats, "1.2.3", {"host": 100}, pinned_bytes=800, idle="", disks=disks)


def test_the_page_equals_the_code():
    """Write it anew with ``python -m tests.unit.test_metrics``."""
    assert (ROOT / "docs" / "METRICS.md").read_text() == page()


def test_every_metric_has_a_value(snapshot):
    text = exposition(snapshot).decode()
    found = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    unknown = (
        names.LOAD_RATE,
        names.PREFILL_RATE,
        names.IDLE_INFO,
    )  # absent while unknown, or while it serves
    rates = {metric.name for metric in unknown}
    for metric in catalog():
        assert metric.name in found or metric.name in rates, f"{metric.name} is never served"
    assert found <= {metric.name for metric in catalog()}


def test_values_are_those_of_the_scheduler(snapshot):
    values = {(s.metric, s.labels): s.value for s in samples(snapshot)}
    assert values[names.LOOKUPS, ()] == 2
    assert values[names.HIT_TOKENS, ()] == 16
    assert values[names.FULL_HITS, ()] == 1
    assert values[names.MISSED, (Reason.NEVER_STORED.value,)] == 1
    assert values[names.DECISIONS, (Verdict.LOAD_UNMEASURED.value,)] == 1
    assert values[names.MOVED_BYTES, ("device", "host", "staged")] == 400
    assert values[names.MOVED_SECONDS, ("host", "device", "kernel")] == pytest.approx(0.001)
    assert values[names.SLOTS, ("host", "cached")] == 4
    assert values[names.SLOTS, ("disk", "free")] == 8
    assert values[names.PINNED_BYTES, ()] == 800
    assert values[names.RESTORED_BLOCKS, ("disk",)] == 0
    assert values[names.DRIVE_BYTES, ("disk", "read")] == 3000
    assert values[names.DRIVE_SECONDS, ("disk", "write")] == 0.25
    assert values[names.DRIVE_FAILED, ("disk", "damaged")] == 2
    assert values[names.DRIVE_FAILED, ("disk", "absent")] == 0
    assert values[names.DURABLE_LAG, ("disk",)] == 0.5
    assert values[names.MOVED_COPIES, ("host", "device", "kernel")] == 1


def test_all_reasons_and_verdicts_are_there_before_they_happen(snapshot):
    text = exposition(snapshot).decode()
    for reason in set(Reason) - {Reason.NOTHING_MISSED}:
        assert f'kvferry_misses_total{{reason="{reason.value}"}}' in text
    for verdict in Verdict:
        assert f'kvferry_decisions_total{{verdict="{verdict.value}"}}' in text


def test_the_reasons_on_the_page_are_those_that_are_counted():
    assert tuple(FAILURES.values()) == names.DRIVE_ERRORS
    assert {*names.MISSES, Reason.NOTHING_MISSED.value} == {each.value for each in Reason}


def test_a_thousand_requests_add_no_series():
    scheduler = busy_scheduler()
    for number in range(1000):
        scheduler.match(f"request-{number}", chain(NAMESPACE, np.arange(number, number + 16)))
        scheduler.finish(f"request-{number}")
    text = exposition(Snapshot(scheduler.stats(), "1")).decode()
    assert "request-" not in text
    assert len(text.splitlines()) < 250


def parsed(text: bytes) -> list[tuple[str, dict[str, str], str]]:
    families = text_string_to_metric_families(text.decode())
    return [(s.name, s.labels, repr(float(s.value))) for f in families for s in f.samples]


NUMBERS = st.one_of(
    st.integers(0, 1 << 60), st.floats(), st.sampled_from([1e6, 123456.0, 1234567.5, 4e9, 1e10])
)


@given(
    labels=st.tuples(st.text(), st.text(), st.text()),
    values=st.lists(NUMBERS, min_size=4, max_size=4),
)
@example(labels=('a"b', "c\\d", "e\nf"), values=[0, 1e6, 4e9, 0.5])
def test_the_client_library_reads_what_is_written(labels, values):
    stats = replace(
        busy_scheduler().stats(),
        traffic={labels: Traffic(1, values[0], values[3])},
        queries=values[0],
        bandwidth=values[1],
        leases={labels[0]: values[2]},
    )
    snapshot = Snapshot(stats, labels[1], {labels[2]: values[3]})
    read = parsed(exposition(snapshot))
    said = {(sample.metric.name, sample.labels): sample.value for sample in samples(snapshot)}
    assert len(read) == len(said)
    assert {(name, tuple(sorted(texts.values())), value) for name, texts, value in read} == {
        (name, tuple(sorted(texts)), repr(float(value))) for (name, texts), value in said.items()
    }


def test_of_several_requests_of_one_name_the_latest_is_explained():
    scheduler = busy_scheduler()
    keys = chain(NAMESPACE, np.arange(16))
    for request_id in ("cmpl-a-0-8b2677e1", "cmpl-a-1-8b2677e2", "cmpl-b-0-8b2677e3"):
        scheduler.match(request_id, keys)
    source = Source(scheduler, Mailbox())  # type: ignore[arg-type]
    told = source.explain("cmpl-a")
    assert told is not None
    assert told["request_id"] == "cmpl-a-1-8b2677e2"
    assert told["others"] == ["cmpl-a-0-8b2677e1"]
    exact = source.explain("cmpl-a-0-8b2677e1")
    assert exact is not None
    assert exact["request_id"] == "cmpl-a-0-8b2677e1"
    assert exact["others"] == []
    assert source.explain("cmpl-c") is None


if __name__ == "__main__":
    (ROOT / "docs" / "METRICS.md").write_text(page())
