"""What is shipped to be deployed names only what exists, in the languages it is written in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from tests.fakes.metrics_page import FIGURES

from kvferry.config import DISK_KEY_ENV, Config, describe
from kvferry.core.quantities import parse_size
from kvferry.telemetry.catalog import Label, Metric, MetricKind, catalog

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALONE = Metric("kvferry:alone", MetricKind.GAUGE, "A recording rule of ours.", (Label("host", ""),))
SERIES = {metric.name: metric for metric in (ALONE, *catalog())}
TARGET = {"instance", "job"}
VLLMS = {"model_name", "engine"}
RATES = ("rate", "increase", "irate")


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvferry.json").read_text())
    return loaded


def rules() -> dict[str, list[dict[str, Any]]]:
    """The alerts by their endpoint."""
    text = (DEPLOY / "prometheus" / "kvferry-alerts.yml").read_text()
    alerts = [r for group in yaml.safe_load(text)["groups"] for r in group["rules"] if "alert" in r]
    return {
        source: [rule for rule in alerts if rule["labels"]["source"] == source]
        for source in ("vllm", "kvferry")
    }


def filled(query: str, names: str) -> str:
    """A dashboard's query as Grafana sends it."""
    query = query.replace("${names}", names).replace("$__rate_interval", "5m")
    return query.replace("$instance", ".*")


def queries() -> Iterator[tuple[str, str]]:
    for panel in board()["panels"]:
        for number, target in enumerate(panel["targets"]):
            for names in ("kvferry_", "vllm:kvferry_"):
                where = f"panel {panel['title']!r} {number} {names}"
                yield where, filled(target["expr"], names)
    for source, some in rules().items():
        for rule in some:
            yield f"alert {rule['alert']} {source}", rule["expr"]
    for words, query in FIGURES.items():
        yield f"figure {words!r}", query.replace("\\|", "|")  # escaped for a table


def parts(expr: Any) -> Iterator[Any]:
    """An expression and all below it."""
    yield expr
    for name in ("lhs", "rhs", "expr", "param", "args", "vector_selector"):
        below = getattr(expr, name, None)
        for part in below if isinstance(below, list) else [below]:
            if part is not None:
                yield from parts(part)


def metric_of(selector: Any) -> Metric:
    name = selector.name.removeprefix("vllm:")
    assert name in SERIES, f"{selector.name} is no metric"
    return SERIES[name]


def labels_of(selector: Any) -> set[str]:
    labels = {label.name for label in metric_of(selector).labels} | TARGET
    return labels | VLLMS if selector.name.startswith("vllm:") else labels


def selectors(expr: Any) -> list[Any]:
    return [part for part in parts(expr) if isinstance(part, promql_parser.VectorSelector)]


def check(part: Any) -> None:
    """Labels that the metric has, values that the label has, and rates of counters only."""
    if isinstance(part, promql_parser.VectorSelector):
        known = {label.name: label.values for label in metric_of(part).labels}
        for matcher in part.matchers.matchers:
            assert matcher.name in labels_of(part), matcher
            if matcher.name in known:
                for value in matcher.value.split("|"):
                    assert re.search(rf"\b{value}\b", known[matcher.name]), matcher
    modifier: Any = getattr(part, "modifier", None)
    by = modifier if hasattr(modifier, "labels") else getattr(modifier, "matching", None)
    grouped_by = set() if by is None else set(by.labels)
    for selector in selectors(part):
        assert grouped_by <= labels_of(selector), f"{grouped_by} of {selector.name}"
    if isinstance(part, promql_parser.Call) and part.func.name in RATES:
        (selector,) = selectors(part)
        assert metric_of(selector).kind is not MetricKind.GAUGE, f"a rate of {selector.name}"


ALL = dict(queries())


@pytest.mark.parametrize("query", ALL.values(), ids=ALL)
def test_a_query_parses_and_asks_for_what_exists(query):
    expr = promql_parser.parse(query)
    assert selectors(expr), query
    for part in parts(expr):
        check(part)


NOT_TWICE = r"\((.*)\)\s+and on \(instance\) kvferry:alone\s*"


def test_alerts_are_the_same_for_both_endpoints():
    """And kvferry's own keep silent where vLLM's speak for the same server."""
    vllms, ours = rules()["vllm"], rules()["kvferry"]
    for rule in ours + vllms:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
    for our, vllm in zip(ours, vllms, strict=True):
        alone = re.fullmatch(NOT_TWICE, our["expr"], re.DOTALL)
        assert alone is not None, our["expr"]
        assert alone[1].split() == vllm["expr"].replace("vllm:", "").split()
        assert our["annotations"] == vllm["annotations"]
    # Two rules of one name and labels: Prometheus could not tell them apart.
    named = [(rule["alert"], *sorted(rule["labels"].items())) for rule in ours + vllms]
    assert len(set(named)) == len(named)


def documents(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The documents of a manifest by kind and name."""
    text = (DEPLOY / "kubernetes" / name).read_text()
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(text)}


SERVER = documents("vllm-kvferry.yaml")
FLEET = documents("fleet.yaml")
PODS = {kind: d["spec"]["template"] for (kind, _), d in SERVER.items() if "template" in d["spec"]}
FLEET_PODS = {
    kind: d["spec"]["template"] for (kind, _), d in FLEET.items() if "template" in d["spec"]
}
POD = PODS["Deployment"]["spec"]
(CONTAINER,) = POD["containers"]


def size(text: str) -> int:
    return parse_size(f"{text}B")


def config_of(container: dict[str, Any]) -> Config:
    """Its settings; the disk's key is none, and comes from a secret."""
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env.pop(DISK_KEY_ENV, None) is None
    ours = {name: value for name, value in env.items() if name.startswith("KVFERRY_")}
    assert set(ours) <= {setting.env for setting in describe()}
    return Config.load(None, ours)


def check_memory(pod: dict[str, Any], container: dict[str, Any], more: int = 0) -> None:
    """Host memory, shared memory and what else is given fit the container."""
    (shm,) = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm"]
    assert shm["medium"] == "Memory"
    host = config_of(container).host
    assert isinstance(host, int)
    assert host + more + size(shm["sizeLimit"]) < size(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize("version", ["1.29", "1.32", kubernetes_validate.latest_version()])
def test_the_manifests_are_what_kubernetes_takes(version):
    for document in [*SERVER.values(), *FLEET.values()]:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_manifest_sets_settings_that_exist():
    check_memory(POD, CONTAINER)
    assert CONTAINER["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (transfer,) = [a for a in CONTAINER["args"] if a.startswith("--kv-transfer-config=")]
    assert json.loads(transfer.split("=", 1)[1])["kv_connector"] == "kvferry"
    # /explain names requests: it is on loopback, no port of pod or service.
    config = config_of(CONTAINER)
    assert config.metrics_port is not None
    assert config.metrics_host == "127.0.0.1"
    (service,) = [d for (kind, _), d in SERVER.items() if kind == "Service"]
    for port in (*CONTAINER["ports"], *service["spec"]["ports"]):
        assert config.metrics_port not in port.values(), port


def test_blocks_and_models_are_kept_on_claims():
    claims = {name: d for (kind, name), d in SERVER.items() if kind == "PersistentVolumeClaim"}
    kept: dict[str, str] = {
        v["name"]: v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"][1:]
    }
    assert set(kept.values()) == set(claims)
    places = {m["mountPath"]: kept.get(m["name"], "") for m in CONTAINER["volumeMounts"]}
    assert places["/root/.cache/huggingface"] == "vllm-kvferry"
    config = config_of(CONTAINER)
    (directory,) = config.disk
    claim = size(claims[places[directory]]["spec"]["resources"]["requests"]["storage"])
    assert config.disk_size + config.disk_keep_free < 0.95 * claim, "file systems need room, too"
    assert config.tier_write == "through", "or a restart finds only what was evicted before"
    (key,) = [item for item in CONTAINER["env"] if item["name"] == DISK_KEY_ENV]
    assert key["valueFrom"]["secretKeyRef"]["optional"], "encryption is optional"


def test_the_pod_monitor_finds_the_pods_and_their_port():
    ((_, monitor),) = documents("podmonitor.yaml").items()
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= PODS["Deployment"]["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in CONTAINER["ports"]]


def test_the_fleets_servers_find_its_master_and_fit_their_pods():
    (server,) = FLEET_PODS["StatefulSet"]["spec"]["containers"]
    (master,) = FLEET_PODS["Deployment"]["spec"]["containers"]
    assert server["image"] == master["image"]
    config = config_of(server)
    address = config.remote
    assert address is not None
    name, port = address.place.split(":")
    service = FLEET["Service", name]["spec"]
    (rpc,) = service["ports"]
    assert rpc["port"] == int(port)
    assert service["selector"].items() <= FLEET_PODS["Deployment"]["metadata"]["labels"].items()
    ports = {each["name"]: each["containerPort"] for each in master["ports"]}
    assert f"--rpc_port={ports[rpc['targetPort']]}" in master["args"]
    assert f"--metrics_port={ports['metrics']}" in master["args"]
    segment = parse_size(address.options["segment"])
    assert segment > 0, "a server must give memory"
    check_memory(FLEET_PODS["StatefulSet"]["spec"], server, segment)
    assert config.tier_write == "through"
    assert config.metrics_host == "127.0.0.1"


def test_only_the_fleets_pods_reach_its_store():
    policy = FLEET["NetworkPolicy", "kvferry-fleet"]["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    for pod in FLEET_PODS.values():
        assert chosen <= pod["metadata"]["labels"].items()
    ours, public = policy["ingress"]
    assert ours == {"from": [{"podSelector": policy["podSelector"]}]}
    (server,) = FLEET_PODS["StatefulSet"]["spec"]["containers"]
    assert public == {"ports": [{"port": server["ports"][0]["containerPort"]}]}
    assert "mooncake" in (DEPLOY / "docker" / "Dockerfile").read_text()


def docker_run(text: str) -> list[str]:
    """The words of a ``docker run`` that goes on over lines that end in a backslash."""
    found = re.search(r"^[# ]*(docker run .*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return shlex.split(re.sub(r"\\\n[# ]*", "", found[1]))


def test_the_line_that_runs_the_container_is_whole_and_the_same_everywhere():
    words = docker_run((DEPLOY / "docker" / "Dockerfile").read_text())
    assert words == docker_run((ROOT / "docs" / "operations.md").read_text())
    (given,) = [word for word in words if word.startswith("KVFERRY_HOST=")]
    config = Config.load(None, dict([given.split("=")]))
    assert isinstance(config.host, int)
    assert config.host < parse_size(words[words.index("--memory") + 1].upper() + "iB")
    assert json.loads(words[-1])["kv_connector"] == "kvferry"
    mounts = [word.split(":")[1] for before, word in pairwise(words) if before == "-v"]
    assert mounts == ["/root/.cache/huggingface"]


def test_the_build_sees_what_the_dockerfile_copies_and_nothing_else():
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.M)
    assert "*" in ignored
    seen = {line[1:] for line in ignored if line.startswith("!")}
    assert seen == {name for names in copied for name in names.split()}
    assert all((ROOT / name).exists() for name in seen)


CHART = DEPLOY / "helm" / "kvferry"


def rendered(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The chart's documents by Go's own template engine, for a release called ``demo``."""
    go = pytest.importorskip("go_template")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    data = folder / "values.json"
    data.write_text(json.dumps({"Values": values, "Release": {"Name": "demo"}}))
    documents: list[dict[str, Any]] = []
    for template in sorted((CHART / "templates").iterdir()):
        out = folder / template.name
        go.render_template(str(template), str(data), str(out))
        documents += [each for each in yaml.safe_load_all(out.read_text()) if each]
    return documents


def manifests(name: str, *renamed: tuple[str, str]) -> list[dict[str, Any]]:
    text = (DEPLOY / "kubernetes" / name).read_text()
    for before, after in renamed:
        assert before in text
        text = text.replace(before, after)
    return list(yaml.safe_load_all(text))


def test_the_chart_makes_the_manifests(tmp_path):
    """So every check of the manifests is one of the chart."""
    name = ("vllm-kvferry", "demo")
    image = ("registry.example/demo", "registry.example/vllm-kvferry")
    monitor = manifests("podmonitor.yaml", name)
    server = manifests("vllm-kvferry.yaml", name, image)
    assert rendered(tmp_path, podMonitor={"enabled": True}) == monitor + server
    fleet_names = (
        ("vllm-kvferry-fleet", "demo"),
        ("kvferry-mooncake", "demo-store"),
        ("kvferry-fleet: one", "kvferry-fleet: demo"),
        ("name: kvferry-fleet", "name: demo"),
    )
    assert rendered(tmp_path, fleet={"enabled": True}) == manifests("fleet.yaml", *fleet_names)


def test_the_charts_values_reach_the_server(tmp_path):
    changes: dict[str, Any] = {
        "disk": {"enabled": False},
        "args": ["--tensor-parallel-size=2"],
        "gpus": 2,
        "settings": {"KVFERRY_LOG_LEVEL": "info"},
    }
    documents = rendered(tmp_path, **changes)
    for document in documents:
        kubernetes_validate.validate(document, "1.32", strict=True)
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    assert server["args"][2:] == changes["args"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "2"
    env = {item["name"]: item.get("value") for item in server["env"]}
    assert env["KVFERRY_LOG_LEVEL"] == "info"
    assert "KVFERRY_DISK" not in env
    assert [volume["name"] for volume in spec["volumes"]] == ["shm", "kept"]
    assert sum(each["kind"] == "PersistentVolumeClaim" for each in documents) == 1
