"""`vllm serve` with kvferry, as users see it: answers, metrics, orderly and violent ends."""

from __future__ import annotations

import subprocess

import pytest
from tests.integration.vllm.engine import make_prompts
from tests.integration.vllm.server import COMMAND, Server, our_shared_memory, process_env

from kvferry.metrics.http import HttpServer
from kvferry.watch.scrape import explain
from kvferry.watch.view import Watch

# A machine under load must not turn into failed copies.
FERRY = {
    "host": "64MiB",
    "load_policy": "always",
    "load_deadline": "5min",
    "store_deadline": "5min",
}

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
    assert any(copy["dst"] == "device" for one in told for copy in one["copies"])
    assert all(one["explanation"]["reason"] for one in told)


def test_answers_metrics_and_an_orderly_end(serve, llama):
    probe = HttpServer(lambda path: None)  # a port that is free
    probe.close()
    server = serve(llama, ferry={**FERRY, "metrics_port": probe.port})
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
    assert server.metric("vllm:external_prefix_cache_queries_total") > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    assert server.metric("vllm:kvferry_hit_tokens_total") > 0
    assert server.metric("vllm:kvferry_moved_bytes_total") > 0
    assert server.metric("vllm:kvferry_failed_transfers_total") == 0
    check_tools(f"http://127.0.0.1:{server.port}", probe.url)
    server.post("/reset_prefix_cache?reset_external=true", {})
    assert server.complete(prompts[0]) == answers[0]
    assert server.terminate() == 0
    server.wait_until_gone()
    assert our_shared_memory() == []
    assert "out of service" not in server.log


def test_a_violent_end_leaves_nothing_behind(serve, llama):
    server = serve(llama, ferry=FERRY)
    for prompt in make_prompts(42, 300, 300):
        server.complete(prompt)
    server.kill()
    server.wait_until_gone()
    assert our_shared_memory() == []


def test_the_published_benchmark_with_and_without(serve, llama, capsys):
    """No figure is asserted: on a small CPU they mean little. That it runs and hits is."""
    reports = {}
    for name, ferry in [("without kvferry", None), ("with kvferry", FERRY)]:
        server = serve(llama, ferry=ferry)
        done = subprocess.run(
            [
                *(str(COMMAND), "bench", "serve", "--backend", "openai"),
                *("--base-url", f"http://127.0.0.1:{server.port}", "--model", "tiny"),
                *("--tokenizer", str(llama), "--dataset-name", "prefix_repetition"),
                *("--prefix-repetition-prefix-len", "320", "--prefix-repetition-suffix-len", "32"),
                *("--prefix-repetition-num-prefixes", "8", "--prefix-repetition-output-len", "8"),
                *("--num-prompts", "48", "--max-concurrency", "4", "--seed", "1"),
            ],
            env=process_env(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        reports[name] = done.stdout[done.stdout.index("====") :]
        if ferry is not None:
            assert server.metric("vllm:external_prefix_cache_hits_total") > 0
        assert server.terminate() == 0
    with capsys.disabled():
        for name, report in reports.items():
            print(f"\n-- vllm bench serve, {name}\n{report}")
