"""Rules and dashboard with the real Prometheus, where it is installed (Debian: prometheus).

Without it the same queries are at least parsed and held against the catalog, in the unit tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from tests.fakes.endpoint import FakeEndpoint, stats
from tests.unit.test_deploy import DEPLOY, board, filled

from kvferry.metrics.catalog import FIGURES
from kvferry.metrics.http import HttpServer
from kvferry.metrics.samples import Snapshot

RULES = DEPLOY / "prometheus" / "kvferry-alerts.yml"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_rules():
    assert "10 rules found" in promtool("check", "rules", "--lint-fatal", str(RULES))


# What a server does each minute, and which alert it sets off (none for a healthy one).
STORIES: dict[str, tuple[dict[str, str], str | None]] = {
    "healthy": (
        {
            "queries_total": "0+60x600",
            "hit_tokens_total": "0+9000x600",
            "failed_transfers_total": "0+0x600",
            "overdue_transfers_total": "0+0x600",
            'misses_total{reason="evicted"}': "0+2x600",
            'misses_total{reason="never_stored"}': "0+50x600",
            'moved_bytes_total{src="host",dst="device",path="kernel"}': "0+50000000000x600",
            'moved_seconds_total{src="host",dst="device",path="kernel"}': "0+1x600",
        },
        None,
    ),
    "fails": ({"failed_transfers_total": "0+1x600"}, "KvferryTransfersFail"),
    "overdue": ({"overdue_transfers_total": "0+1x600"}, "KvferryTransfersOverdue"),
    "too small": (
        {
            "queries_total": "0+60x600",
            "hit_tokens_total": "0+90x600",
            'misses_total{reason="evicted"}': "0+30x600",
            'misses_total{reason="never_stored"}': "0+1x600",
        },
        "KvferryHostTooSmall",
    ),
    "slow": (
        {
            'moved_bytes_total{src="host",dst="device",path="loop"}': "0+4000000000x600",
            'moved_seconds_total{src="host",dst="device",path="loop"}': "0+1x600",
        },
        "KvferryLoadsSlow",
    ),
    "useless": (
        {"queries_total": "0+60x600", "hit_tokens_total": "0+0x600"},
        "KvferryNothingIsLoaded",
    ),
}


def expectations(story: str, prefix: str, source: str) -> dict[str, Any]:
    series, alert = STORIES[story]
    inputs = []
    for name, values in series.items():
        bare, _, labels = name.rstrip("}").partition("{")
        inside = ",".join(filter(None, ['instance="a:1"', labels]))
        inputs.append({"series": f"{prefix}{bare}{{{inside}}}", "values": values})
    (groups,) = yaml.safe_load(RULES.read_text()).values()
    tests = []
    for rule in next(g["rules"] for g in groups if g["rules"][0]["labels"]["source"] == source):
        fires = {
            "exp_labels": {**rule["labels"], "instance": "a:1"},
            "exp_annotations": {
                name: words.replace("{{ $labels.instance }}", "a:1")
                for name, words in rule["annotations"].items()
            },
        }
        tests.append(
            {
                "alertname": rule["alert"],
                "eval_time": "9h",
                "exp_alerts": [fires] if rule["alert"] == alert else [],
            }
        )
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": tests}


@needs_promtool
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("prefix", "source"), [("kvferry_", "kvferry"), ("vllm:kvferry_", "vllm")])
def test_each_alert_fires_for_what_it_is_about_and_for_nothing_else(
    story: str, prefix: str, source: str, tmp_path: Path
) -> None:
    file = tmp_path / "test.yml"
    told = {"rule_files": [str(RULES)], "tests": [expectations(story, prefix, source)]}
    file.write_text(yaml.safe_dump(told))
    promtool("test", "rules", str(file))


# -- a running one -------------------------------------------------------------------------------


class Prometheus:
    """A server that scrapes every second. Owns its process."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        assert PROMETHEUS is not None
        probe = HttpServer(lambda path: None)  # a port that is free
        probe.close()
        self.url = probe.url
        config = folder / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {"job_name": "kvferry", "static_configs": [{"targets": targets}]}
                    ],
                }
            )
        )
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{probe.port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, what: str, **query: str) -> Any:
        with urlopen(f"{self.url}api/v1/{what}?{urlencode(query)}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def prometheus(folder: Path, *endpoints: FakeEndpoint) -> Iterator[Prometheus]:
    targets = [endpoint.url.removeprefix("http://").rstrip("/") for endpoint in endpoints]
    running = Prometheus(folder, targets)
    try:
        yield running
    finally:
        running.close()


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while True:
        try:
            if what():
                return
        except URLError:
            pass
        assert time.monotonic() < give_up, "this never came about"
        time.sleep(0.2)


@needs_prometheus
def test_every_panel_has_something_to_show(tmp_path):
    """Two endpoints of ours and a vLLM's are scraped while they count; then all queries are asked.

    Two, because a join that forgets the instance is refused only then.
    """
    ours, others, vllms = FakeEndpoint(), FakeEndpoint(), FakeEndpoint()
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        now = Snapshot(stats(queries=count, moved=count), "1", {"host": 1 << 20}, 1 << 30, 3)
        ours.show(now)
        others.show(now)
        vllms.show_as_vllm(now)

    try:
        with prometheus(tmp_path, ours, others, vllms) as server:

            def is_scraped() -> bool:
                work()
                found = server.ask("query", query="count_over_time(up[1m])")["result"]
                return len(found) == 3 and all(float(one["value"][1]) >= 4 for one in found)

            wait_for(is_scraped)
            assert {one["value"][1] for one in server.ask("query", query="up")["result"]} == {"1"}
            empty = []
            for panel in board()["panels"]:
                for target in panel["targets"]:
                    for names in ("kvferry_", "vllm:kvferry_"):
                        query = filled(target["expr"], names).replace("[5m]", "[1m]")
                        found = server.ask("query", query=query)["result"]
                        if not found or any(one["value"][1] == "NaN" for one in found):
                            empty.append((panel["title"], query, found))
            for words, query in FIGURES.items():
                query = query.replace("\\|", "|").replace("[5m]", "[1m]")
                if not server.ask("query", query=query)["result"]:
                    empty.append((words, query, []))
            assert not empty
            (kvferry, vllm) = server.ask("rules")["groups"]
            states = {rule["health"] for group in (kvferry, vllm) for rule in group["rules"]}
            assert states <= {"ok", "unknown"}
    finally:
        for endpoint in (ours, others, vllms):
            endpoint.close()
