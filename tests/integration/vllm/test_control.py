"""Every hint and every action through a real `vllm serve`, over HTTP; answers never change.

One server for all of it: 40 blocks of host memory, of which twenty may be held, ten by whoever is
not one of the agents, above a tier that has room for everything. A prompt of 200 tokens is six
whole blocks.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port
from tests.integration.vllm.engine import FERRY, make_prompts
from tests.integration.vllm.server import Server

from kvferry.tools.top.scrape import explain
from kvferry.tools.top.view import Watch

TOKEN = "the-token-of-these-tests"
BLOCKS, TOKENS = 6, 6 * 32
SEEDS = count(500)


class Controlled(Server):
    """A server, and whoever gives it orders."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        port = free_port()
        self.ours = f"http://127.0.0.1:{port}"
        (folder / "token").write_text(TOKEN)
        self.token_file = folder / "token"
        ferry = {
            **FERRY,
            "host": f"{40 * 64}KiB",
            "tiers": "memory:64MiB",
            "tier_write": "through",
            "promote_deadline": "5min",
            "metrics_port": port,
            "policy": "lru",  # what goes first can be told beforehand
            "tenants": "agents=50%, *",
            "pin_share": "50%",
            "control_token": f"file:{self.token_file}",
        }
        ferry = {name: value for name, value in (ferry | settings).items() if value is not None}
        super().__init__(model, folder / "server.log", ferry=ferry)

    def ask(self, prompt: list[int], hints: dict[str, Any] | None = None, **more: Any) -> Asked:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        if hints is not None:
            body["kv_transfer_params"] = {"kvferry": hints}
        answer = self.post("/v1/completions", body)
        return Asked(answer["id"], answer["choices"][0]["text"])

    def order(self, action: str, **order: Any) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"{self.ours}/control/{action}",
            json.dumps(order).encode(),
            {"Authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            done: dict[str, Any] = json.loads(answer.read())
        return done

    def figure(self, name: str, tier: str = "host") -> float:
        with urllib.request.urlopen(f"{self.ours}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(ln.split()[-1]) for ln in lines if ln.startswith(name) and tier in ln)

    def why(self, asked: Asked) -> dict[str, Any]:
        return explain(self.ours, asked.id)

    def forget_device(self) -> None:
        self.post("/reset_prefix_cache", {})

    def fill(self, num_prompts: int = 7) -> None:
        """As many others as push everything out of the host that nobody holds."""
        for prompt in make_prompts(next(SEEDS), *[200] * num_prompts):
            self.ask(prompt)
        self.rest()

    def rest(self) -> None:
        """Until all that was computed is stored: nothing is under way, and nothing new comes."""
        before, still, give_up = -1.0, 0, time.monotonic() + 120
        while still < 3:
            assert time.monotonic() < give_up, "the engine never rests"
            under_way = self.figure("kvferry_queued", "") + self.figure("kvferry_transfers_in", "")
            landed = self.figure("kvferry_completed_transfers", "")
            still = still + 1 if landed == before and not under_way else 0
            before = landed
            time.sleep(0.2)


class Asked:
    """A request's id and its answer."""

    def __init__(self, name: str, text: str) -> None:
        self.id = name
        self.text = text


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    running = Controlled(llama, tmp_path_factory.mktemp("control"))
    yield running
    running.kill()


@pytest.fixture
def prompt() -> list[int]:
    (made,) = make_prompts(next(SEEDS), 200)
    return made


def test_do_not_store(server, prompt):
    plain = server.ask(make_prompts(next(SEEDS), 200)[0])
    asked = server.ask(prompt, {"do_not_store": True})
    server.rest()
    assert server.order("lookup", request_id=plain.id)["host_tokens"] == TOKENS
    told = server.order("lookup", request_id=asked.id)
    assert (told["tokens"], told["host_tokens"], told["lower_tokens"]) == (TOKENS, 0, 0)
    assert server.ask(prompt).text == asked.text
    some = make_prompts(next(SEEDS), 200)[0]
    params = {"kvferry": {}, "max_offload_tokens": 64}  # vLLM's own name for it
    half = server.ask(some, kv_transfer_params=params)
    server.rest()
    assert server.order("lookup", request_id=half.id)["host_tokens"] == 64


def test_do_not_load(server, prompt):
    first = server.ask(prompt)
    server.rest()
    server.forget_device()
    again = server.ask(prompt, {"do_not_load": True})
    assert again.text == first.text
    assert server.why(again)["explanation"]["reason"] == "hint"
    server.forget_device()
    some = server.ask(prompt, kv_transfer_params={"max_load_tokens": 96})  # vLLM's own name
    assert some.text == first.text
    assert (
        sum(copy["num_blocks"] for copy in server.why(some)["copies"] if copy["dst"] == "device")
        == 3
    )
    server.forget_device()
    last = server.ask(prompt)
    assert last.text == first.text
    assert server.why(last)["explanation"]["host_tokens"] > 96


def test_an_answers_id_is_all_of_its_requests_and_no_others(server):
    prompts = make_prompts(next(SEEDS), 200, 200)
    asked = server.ask(prompts, n=2, temperature=0.5)
    server.rest()
    told = server.order("lookup", request_id=asked.id)
    assert len(told["request_ids"]) == 4
    assert told["host_tokens"] == 4 * TOKENS
    one = server.order("lookup", request_id=told["request_ids"][0])
    assert (one["request_ids"], one["host_tokens"]) == (told["request_ids"][:1], TOKENS)
    for piece in ("cmpl", "0", asked.id[:-1], asked.id.removeprefix("cmpl-")):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.order("drop", request_id=piece)
    told = server.order("drop", request_id=asked.id)
    assert (told["host_tokens"], told["lower_tokens"], told["refused"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("path", "body", "requests"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 1),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "n": 3}, 3),
        ("completions", {"prompt": [7, 8, 9], "n": 2, "use_beam_search": True}, 3),
        ("responses", {"input": "hello", "max_output_tokens": 2}, 1),
    ],
)
def test_every_kind_of_answer_names_its_requests(server, path, body, requests):
    most = {} if "max_output_tokens" in body else {"max_tokens": 2}
    answer = server.post(f"/v1/{path}", {"model": "tiny", **body, **most})
    told = server.order("lookup", request_id=answer["id"])
    assert len(told["request_ids"]) == requests


def test_pin_and_unpin_by_tokens_and_by_salt(server, prompt):
    asked = server.ask(prompt, cache_salt="tenant-one")
    server.rest()
    assert server.order("lookup", tokens=prompt)["host_tokens"] == 0  # another's, without the salt
    named = {"tokens": prompt, "salt": "tenant-one"}
    assert server.order("lookup", **named)["host_tokens"] == TOKENS
    told = server.order("pin", **named)
    assert told["blocks"] == BLOCKS
    # Of ten that may be held in host memory each of two tenants has five; the last is held below.
    assert "each tenant's at most its part of those" in told["refused"][0]
    server.fill()
    assert server.order("lookup", **named)["host_tokens"] >= TOKENS - 32
    assert server.order("unpin", **named)["blocks"] >= BLOCKS
    server.forget_device()
    assert server.ask(prompt, cache_salt="tenant-one").text == asked.text


def test_prefetch_on_an_idle_engine_and_drop(server, prompt):
    asked = server.ask(prompt)
    server.rest()
    server.fill()
    told = server.order("lookup", tokens=prompt)
    assert (told["host_tokens"], told["lower_tokens"]) == (0, TOKENS)
    assert server.order("prefetch", request_id=asked.id, seconds=60)["is_under_way"]
    give_up = time.monotonic() + 120
    while (told := server.order("lookup", tokens=prompt))["held_blocks"] < BLOCKS:
        assert time.monotonic() < give_up, "nothing was fetched while the engine is idle"
    assert told["host_tokens"] == TOKENS
    server.forget_device()
    again = server.ask(prompt)
    assert again.text == asked.text
    assert server.why(again)["explanation"]["lower_tokens"] == 0  # it waited for nothing
    assert server.order("drop", tokens=prompt)["blocks"] >= 2 * BLOCKS  # here and below
    told = server.order("lookup", tokens=prompt)
    assert (told["host_tokens"], told["lower_tokens"]) == (0, 0)
    server.forget_device()
    assert server.ask(prompt).text == asked.text


def test_tenants_by_hint_and_by_salt(server, prompt):
    hinted = server.ask(prompt, {"tenant": "agents"})
    (other,) = make_prompts(next(SEEDS), 200)
    salted = server.ask(other, cache_salt="a-secret-salt")
    server.rest()
    agents = 'tenant="agents"'
    assert server.figure("kvferry_tenant_lookups_total", agents) == 1
    on_host, below = f'{agents},tier="host"', f'{agents},tier="memory"'
    assert server.figure("kvferry_tenant_slots", on_host) == BLOCKS
    assert server.figure("kvferry_tenant_slots", below) == BLOCKS
    server.fill()  # by those who have no name: they are above their share and lose first
    assert server.order("lookup", request_id=hinted.id)["host_tokens"] == TOKENS
    assert server.figure("kvferry_tenant_slots", on_host) == BLOCKS
    assert server.figure("kvferry_tenant_slots", 'tenant="salt-') >= BLOCKS
    server.forget_device()
    assert server.ask(prompt, {"tenant": "agents"}).text == hinted.text
    assert server.figure("kvferry_tenant_hit_tokens_total", agents) == TOKENS
    assert server.ask(other, cache_salt="a-secret-salt").text == salted.text
    with urllib.request.urlopen(f"{server.ours}/metrics", timeout=60) as answer:
        assert b"a-secret-salt" not in answer.read()
    view = Watch(server.ours).look()
    assert "agents" in [tenant.name for tenant in view.tenants]
    assert server.why(hinted)["hints"] == {"tenant": "agents"}


def test_whatever_clients_say_the_server_goes_on(server, prompt):
    """Seen red with a tenant's name that has a bar in it: vLLM's front end raised at its label."""
    first = server.ask(prompt)
    deep: Any = 1
    for _ in range(200):
        deep = {"ended": deep}
    hostile = [
        *({"tenant": "a|b"}, {"tenant": 'a"b\\c'}, {"tenant": "x" * 65}, {"tenant": ["a"]}),
        *({"pin_seconds": 1e300}, {"pin_seconds": "9" * 5000}, {"continues": -1}, deep),
        *({"priorities": [{"priority": 99}] * 64}, {"priorities": [{"priority": 1}] * 65}),
        *({"priorities": [{"token_start": 2**39, "token_end": 2**40}]}, {"max_load_tokens": 2**62}),
    ]
    for hints in hostile:
        try:
            asked = server.ask(prompt, hints)
        except urllib.error.HTTPError as refused:  # vLLM's own checks come before ours
            if refused.code != 400:
                raise
        else:
            assert asked.text == first.text, hints
    for number in range(40):  # each its own tenant
        server.ask([number + 5] * 8, {"tenant": f"made-up-{number}", "do_not_store": True})
    server.rest()
    give_up = time.monotonic() + 120
    while 'tenant="a|b"' not in server.get("/metrics"):
        assert time.monotonic() < give_up
        time.sleep(0.5)  # figures go to vLLM's own endpoint once a second, with answers
        assert server.ask(prompt).text == first.text
    assert server.order("unpin", request_id=first.id)["host_tokens"] == TOKENS
    assert "out of service" not in server.log
    assert "Traceback" not in server.log


def test_at_the_end_nothing_is_wrong(server):
    assert "out of service" not in server.log
    assert server.figure("kvferry_failed_transfers_total", "") == 0
    assert server.terminate() == 0
