"""What is shipped to be deployed names only what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from kvferry.config import Config, describe
from kvferry.metrics.catalog import catalog
from kvferry.quantities import parse_size

DEPLOY = Path(__file__).parents[2] / "deploy"
SERIES = {name for metric in catalog() for name in metric.series}
LABELS = {label.name for metric in catalog() for label in metric.labels} | {"le", "instance"}


def check_query(query: str) -> None:
    plain = query.replace("${names}", "kvferry_").replace("vllm:", "")
    used = set(re.findall(r"kvferry_\w+", plain))
    assert used, query
    assert used <= SERIES, f"{used - SERIES} is no metric: {query}"
    for group in re.findall(r"by \(([^)]*)\)", plain):
        assert {label.strip() for label in group.split(",")} <= LABELS, query
    for label in re.findall(r"(\w+)=~?\"", plain):
        assert label in LABELS, query
    assert plain.count("(") == plain.count(")"), query


def test_the_dashboard_uses_metrics_that_exist():
    board = json.loads((DEPLOY / "grafana" / "kvferry.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    for panel in panels:
        for target in panel["targets"]:
            check_query(target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in LABELS
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on top of each other"
    assert max(x for x, _ in cells) < 24


def test_alerts_use_metrics_that_exist_on_both_endpoints():
    groups = yaml.safe_load((DEPLOY / "prometheus" / "kvferry-alerts.yml").read_text())["groups"]
    ours, vllms = (group["rules"] for group in groups)
    for rule in ours + vllms:
        check_query(rule["expr"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
    for our, vllm in zip(ours, vllms, strict=True):
        assert our["expr"] == vllm["expr"].replace("vllm:", "")
        assert our["annotations"] == vllm["annotations"]


def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "vllm-kvferry.yaml").read_text())
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


def test_the_manifest_sets_settings_that_exist():
    (container,) = pod()["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    ours = {name: value for name, value in env.items() if name.startswith("KVFERRY_")}
    assert set(ours) <= {setting.env for setting in describe()}
    config = Config.from_env(ours)
    assert config.metrics_port in [port["containerPort"] for port in container["ports"]]
    limit = parse_size(container["resources"]["limits"]["memory"] + "B")
    shm = parse_size(pod()["volumes"][0]["emptyDir"]["sizeLimit"] + "B")
    assert isinstance(config.host, int)
    assert config.host + shm < limit
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert pod()["volumes"][0]["emptyDir"]["medium"] == "Memory"
    (transfer,) = [a for a in container["args"] if a.startswith("--kv-transfer-config=")]
    assert json.loads(transfer.split("=", 1)[1])["kv_connector"] == "kvferry"
