"""Hints and actions through a real `vllm serve` whose policy is the default one, which learns.

40 blocks of host memory and no tier below: what is gone from there is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.vllm.engine import make_prompts
from tests.integration.vllm.test_control import SEEDS, TOKENS, Controlled


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    settings = dict.fromkeys(("policy", "tiers", "tier_write", "tenants", "pin_share"))
    running = Controlled(llama, tmp_path_factory.mktemp("default"), **settings)
    yield running
    running.kill()


def ask_in_turn(server: Controlled, num_prompts: int) -> None:
    """Each is stored before the next one comes: the policy has all others to choose from."""
    for _ in range(num_prompts):
        server.fill(1)


def in_host(server: Controlled, name: str) -> int:
    tokens: int = server.order("lookup", request_id=name)["host_tokens"]
    return tokens


def test_what_goes_on_stays_and_what_is_over_goes(server):
    continues, over, plain = make_prompts(next(SEEDS), 200, 200, 200)
    stays = server.ask(continues, {"continues": "1min"})
    server.ask(plain)
    gone = server.ask(over, {"ended": True})
    server.rest()
    assert in_host(server, stays.id) == in_host(server, gone.id) == TOKENS
    ask_in_turn(server, 7)
    assert in_host(server, stays.id) == TOKENS
    assert in_host(server, gone.id) == 0
    server.forget_device()
    assert server.ask(continues).text == stays.text
    assert server.ask(over).text == gone.text


def test_a_pin_holds_and_says_what_it_refuses(server):
    first, second = make_prompts(next(SEEDS), 200, 200)
    asked = []
    for prompt in (first, second):
        asked.append(server.ask(prompt))
        server.rest()
    held = server.order("pin", request_id=asked[0].id)
    assert (held["blocks"], held["refused"]) == (6, [])
    more = server.order("pin", request_id=asked[1].id)
    assert more["blocks"] == 4
    assert "at most 10" in more["refused"][0]
    ask_in_turn(server, 7)
    assert in_host(server, asked[0].id) == TOKENS
    for each in asked:
        server.order("unpin", request_id=each.id)
    dropped = server.order("drop", request_id=asked[0].id)
    assert dropped["blocks"] == 6
    assert in_host(server, asked[0].id) == 0
    server.forget_device()
    assert server.ask(first).text == asked[0].text


def test_at_the_end_nothing_is_wrong(server):
    assert "out of service" not in server.log
    assert server.figure("kvferry_failed_transfers_total", "") == 0
    assert server.terminate() == 0
