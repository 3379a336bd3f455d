"""`vllm serve` with kvferry, as users see it: answers, metrics, orderly and violent ends."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tests.fakes.ports import free_port, free_ports
from tests.integration.vllm.engine import FERRY, make_prompts
from tests.integration.vllm.server import Server, our_shared_memory

from kvferry.config import Config
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.top.scrape import explain
from kvferry.tools.top.view import Watch

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def serve(tmp_path):
    running: list[Server] = []

    def begin(model, *options, ferry=None):
        server = Server(model, tmp_path / f"server{len(running)}.log", *options, ferry=ferry)
        running.append(server)
        return server

    yield begin
    for server in running:
        server.kill()


def check_tools(vllms: str, ours: str) -> None:
    """What ``kvferry top`` and ``kvferry explain`` show of this server."""
    for url in (vllms, ours):
        view = Watch(url).look()
        assert view.hit_rate
        assert {(route.src, route.dst) for route in view.routes} == {
            ("device", "host"),
            ("host", "device"),
        }
        assert view.tiers[0].cached > 0
    told = [explain(ours, row["request_id"]) for row in explain(ours)["requests"]]
    copies = [copy for one in told for copy in one["copies"]]
    assert any(copy["dst"] == "device" for copy in copies)
    assert all(copy["paths"] == ["cpu"] for copy in copies)
    assert all(one["explanation"]["reason"] for one in told)


def check_a_clients_id(server: Server, ours: str, prompt: list[int]) -> None:
    """``kvferry explain`` with the id that the server's answer had, as a user types it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    asked = server.post("/v1/completions", body)["id"]
    told = subprocess.run(
        [sys.executable, "-m", "kvferry", "explain", asked, "--url", ours],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    assert f"Request {asked}-" in told.stdout
    assert "Tokens: " in told.stdout
    refused = subprocess.run(
        [sys.executable, "-m", "kvferry", "explain", "--url", f"127.0.0.1:{server.port}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 1
    assert "metrics_port" in refused.stderr


def test_answers_metrics_and_an_orderly_end(serve, llama):
    port = free_port()
    server = serve(llama, ferry={**FERRY, "metrics_port": port})
    url = f"http://127.0.0.1:{port}/"
    assert "kvferry is in service" in server.log
    prompts = make_prompts(41, *[350] * 6)
    answers = [server.complete(prompt) for prompt in prompts]
    # Six prompts of eleven blocks do not fit 47: the first ones are gone from the device.
    assert [server.complete(prompt) for prompt in prompts] == answers
    question = "Why is the sea salty? " * 8
    answer = server.chat(question)
    follow_up = server.chat(question, answer, "And the rivers? " * 4)
    for prompt in prompts:
        server.complete(prompt)
    assert server.chat(question) == answer
    assert server.chat(question, answer, "And the rivers? " * 4) == follow_up
    server.settle()
    assert server.metric("vllm:external_prefix_cache_queries_total") > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    assert server.metric("vllm:kvferry_hit_tokens_total") > 0
    assert server.metric("vllm:kvferry_moved_bytes_total") > 0
    assert server.metric("vllm:kvferry_failed_transfers_total") == 0
    assert server.metric("vllm:kvferry_slot_bytes") > 0
    check_tools(f"http://127.0.0.1:{server.port}", url)
    check_a_clients_id(server, url, prompts[0])
    server.post("/reset_prefix_cache?reset_external=true", {})
    assert server.complete(prompts[0]) == answers[0]
    assert server.terminate() == 0
    server.wait_until_gone()
    assert our_shared_memory() == []
    assert "out of service" not in server.log


@pytest.mark.soak
def test_each_engine_of_a_data_parallel_server_tells_its_own(serve, llama):
    """Two engines behind two API servers: one endpoint counts for all, two ports explain."""
    first = free_ports(2)
    server = serve(llama, "--data-parallel-size", "2", ferry={**FERRY, "metrics_port": first})
    num_asked = 0
    for seed in range(43, 53):  # which engine is asked is vLLM's choice: until both were
        with ThreadPoolExecutor(6) as at_once:
            prompts = make_prompts(seed, *[200] * 6)
            list(at_once.map(partial(server.complete, max_tokens=2), prompts))
        num_asked += len(prompts)
        told = [
            [row["request_id"] for row in explain(f"http://127.0.0.1:{port}")["requests"]]
            for port in (first, first + 1)
        ]
        if all(told):
            break
    assert all(told), "an engine was never asked"
    assert len({*told[0], *told[1]}) == num_asked
    give_up = time.monotonic() + 60.0
    while (view := Watch(f"http://127.0.0.1:{server.port}").look()).queries < num_asked:
        assert time.monotonic() < give_up, "the last requests were never counted"
        time.sleep(0.2)
    assert view.queries == num_asked
    slots = {port: Watch(f"http://127.0.0.1:{port}").look().tiers[0] for port in (first, first + 1)}
    assert view.tiers[0].total == sum(tier.total for tier in slots.values())
    assert view.tiers[0].slot_bytes == slots[first].slot_bytes
    assert server.terminate() == 0


def connector_of(arguments: list[str]) -> dict[str, Any]:
    """What vLLM's own command line reads from these arguments."""
    from vllm.entrypoints.cli import serve as command
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = command.make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.model_tag == "MODEL"
    connector = parsed.kv_transfer_config
    return connector if isinstance(connector, dict) else vars(connector)


def test_the_manifests_command_line_is_understood():
    file = Path(__file__).parents[3] / "deploy" / "kubernetes" / "vllm-kvferry.yaml"
    parts = {part["kind"]: part for part in yaml.safe_load_all(file.read_text())}
    deployment = parts["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["vllm", "serve"]
    assert connector_of(["MODEL", *container["args"][1:]])["kv_connector"] == "kvferry"


GIVEN = {
    "host": "64GiB",
    "disk": "/mnt/a,/mnt/b",
    "disk_size": "1.5TiB",
    "metrics_port": "none",
    "block_tokens": "32",
    "pin_share": "0.5",
}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_vllm_reads_the_arguments_that_kvferry_prints(form):
    options = [w for name, value in GIVEN.items() for w in (f"--{name.replace('_', '-')}", value)]
    printed = CliRunner().invoke(kvferry, ["vllm-args", *options, *form])
    assert printed.exit_code == 0, printed.output
    connector = connector_of(["MODEL", *shlex.split(printed.output)])
    assert (connector["kv_connector"], connector["kv_role"]) == ("kvferry", "kv_both")
    read = Config.from_dict(connector["kv_connector_extra_config"])
    assert read == Config.from_dict(GIVEN)
