"""The alert rules with Prometheus' own promtool, where it is installed (Debian: prometheus).

Without it the same queries are at least parsed and held against the catalog, in the unit tests.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.test_deploy import DEPLOY, rules

RULES = DEPLOY / "prometheus" / "kvferry-alerts.yml"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_rules():
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(RULES))


@needs_promtool
def test_prometheus_takes_the_configuration():
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


# What a server does each minute, and which alert it sets off (none for a healthy one).
STORIES: dict[str, tuple[dict[str, str], str | None]] = {
    "healthy": (
        {
            "lookups_total": "0+60x600",
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
    "idle": ({'idle{reason="unsupported"}': "1x600"}, "KvferryIdle"),
    "served again": ({'idle{reason="unsupported"}': "1x60 0x540"}, None),
    "fails": ({"failed_transfers_total": "0+1x600"}, "KvferryTransfersFail"),
    "overdue": ({"overdue_transfers_total": "0+1x600"}, "KvferryTransfersOverdue"),
    "too small": (
        {
            "lookups_total": "0+60x600",
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
        {"lookups_total": "0+60x600", "hit_tokens_total": "0+0x600"},
        "KvferryNothingIsLoaded",
    ),
}


def series_of(story: str, prefix: str, instance: str) -> list[dict[str, str]]:
    told = {'info{version="1"}': "1x600", **STORIES[story][0]}
    series = []
    for name, values in told.items():
        bare, _, labels = name.rstrip("}").partition("{")
        inside = ",".join(filter(None, [f'instance="{instance}"', labels]))
        series.append({"series": f"{prefix}{bare}{{{inside}}}", "values": values})
    return series


def expected(rule: dict[str, Any], instance: str) -> dict[str, Any]:
    """The alert as Prometheus would send it."""
    labels = {"instance": instance}
    if "$labels.reason" in rule["annotations"]["summary"]:
        labels["reason"] = "unsupported"
    words = dict(rule["annotations"])
    for name, value in labels.items():
        words = {
            key: text.replace(f"{{{{ $labels.{name} }}}}", value) for key, text in words.items()
        }
    return {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": words}


def run_story(folder: Path, story: str, scraped: dict[str, str], speaks: str) -> None:
    """Let ``scraped`` (instances by prefix) tell ``story``; only ``speaks``'s rules may fire."""
    tests = []
    instance = scraped["vllm:kvferry_" if speaks == "vllm" else "kvferry_"]
    names = [rule["alert"] for rule in rules()[speaks]]
    for name, rule in zip(names, rules()[speaks], strict=True):
        fires = [expected(rule, instance)] if name == STORIES[story][1] else []
        tests.append({"alertname": name, "eval_time": "9h", "exp_alerts": fires})
    series = [one for prefix, at in scraped.items() for one in series_of(story, prefix, at)]
    told = {"interval": "1m", "input_series": series, "alert_rule_test": tests}
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [told]}))
    promtool("test", "rules", str(file))


@needs_promtool
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("prefix", "source"), [("kvferry_", "kvferry"), ("vllm:kvferry_", "vllm")])
def test_each_alert_fires_for_what_it_is_about_and_for_nothing_else(
    story: str, prefix: str, source: str, tmp_path: Path
) -> None:
    run_story(tmp_path, story, {prefix: "a:1"}, source)


@needs_promtool
@pytest.mark.parametrize("story", STORIES)
def test_no_alert_fires_twice_where_both_endpoints_are_scraped(story: str, tmp_path: Path) -> None:
    """All alerts of a name are listed, of both endpoints: one is one too many."""
    run_story(
        tmp_path, story, {"kvferry_": "10.0.0.7:9475", "vllm:kvferry_": "10.0.0.7:8000"}, "vllm"
    )


@needs_promtool
def test_another_hosts_vllm_silences_no_alert(tmp_path: Path) -> None:
    run_story(tmp_path, "fails", {"kvferry_": "a:9475"}, "kvferry")
    others = {"kvferry_": "a:9475", "vllm:kvferry_": "b:8000"}
    with pytest.raises(AssertionError, match="b:8000"):  # both fire: they are two servers
        run_story(tmp_path, "fails", others, "kvferry")
