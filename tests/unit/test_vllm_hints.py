"""What vLLM's clients say of requests, in our words; and how an idle engine loop is woken."""

from __future__ import annotations

import queue
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.desk import Desk, story

from kvferry.connectors.common.hints import read_hints, tenant_of
from kvferry.connectors.vllm import control
from kvferry.connectors.vllm.control import VllmTokens, find_waker
from kvferry.connectors.vllm.engine import _HINTS, VllmEngine
from kvferry.core.identity import Namespace
from kvferry.errors import InputError
from kvferry.hints import NAMES, Hints

NAMESPACE = Namespace(model="m", dtype="f", layout="l", geometry="g", block_tokens=4)
ENGINE = VllmEngine((), NAMESPACE, SimpleNamespace(hash_block_size=4))


def hints_of(params: object) -> tuple[Hints, str]:
    return read_hints(params, _HINTS)


def opened(scheduler: Any, sent: Any) -> Any:
    keys, hints, reason = ENGINE.describe(sent, has_tenants=scheduler.has_tenants)
    return scheduler.open(sent.request_id, keys, hints, unheeded=reason)


def request(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", block_hashes=[bytes(32)], **more)


@pytest.mark.parametrize(
    ("params", "meant"),
    [
        ({}, Hints()),
        ({"do_remote_prefill": True}, Hints()),
        (
            {"max_load_tokens": 64, "max_offload_tokens": 0},
            Hints(max_load_tokens=64, max_store_tokens=0),
        ),
        ({"kvferry": {"ended": True}}, Hints(ended=True)),
        ({"kvferry": {"max_load_tokens": 8}, "max_load_tokens": 64}, Hints(max_load_tokens=8)),
    ],
)
def test_hints_among_other_parameters(params, meant):
    assert hints_of(params) == (meant, "")


@pytest.mark.parametrize("params", [{"kvferry": 7}, {"kvferry": {"x": 1}}, {"max_load_tokens": -1}])
def test_what_is_not_understood_is_not_heeded_and_said(params):
    hints, words = hints_of(params)
    assert hints == Hints()
    assert "are not heeded" in words


def envelope(*actions):
    """As vLLM hands over what an orchestrator sent with a request."""
    made = [
        SimpleNamespace(action_id="1", action_type=kind, action_version=version, payload=said)
        for kind, version, said in actions
    ]
    return SimpleNamespace(protocol_version="1.0", message_id="m", actions=made)


@pytest.mark.parametrize(
    ("params", "actions", "meant", "words"),
    [
        (None, [("kv.fetch", "1.0", {"blocks": [1]})], Hints(), ""),
        (None, [("kv.fetch", "2.0", {}), ("kv.move", "1.0", {})], Hints(), "kv.fetch@2.0, kv.move"),
        (None, [("kvferry.hints", "1.0", {"ended": True})], Hints(ended=True), ""),
        (
            {"kvferry": {"pin_seconds": 5}},
            [("kvferry.hints", "1.0", {"pin_seconds": 60, "tenant": "t"})],
            Hints(pin_seconds=5, tenant="t"),
            "",
        ),
        (None, [("kvferry.hints", "1.0", {"x": 1})], Hints(), "there is no hint"),
        (None, [("kvferry.hints", "1.0", None)], Hints(), ""),
    ],
)
def test_an_orchestrators_actions(params, actions, meant, words):
    sent = request(kv_transfer_params=params, kv_hints=envelope(*actions))
    _, hints, reason = ENGINE.describe(sent, has_tenants=False)
    assert hints == meant
    assert words in reason
    assert bool(words) == bool(reason)


def test_unknown_actions_are_ignored_and_counted():
    desk = Desk()
    sent = request(kv_hints=envelope(("kv.move", "1.0", {}), ("kv.fetch", "1.0", {})))
    opened(desk.scheduler, sent).end()
    opened(desk.scheduler, request(kv_hints=envelope(("kv.fetch", "1.0", {})))).end()
    assert desk.scheduler.stats().unheeded_hints == 1


def nested(depth: int, kind: type) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"over": value} if kind is dict else [value]
    return value


HOSTILE = [
    *(None, True, 0, -1, 2**64, 10**400, 1.5, float("nan"), float("inf"), 1e308, "", "1h", "2m"),
    *("inf", "nan", "-5s", "1" * 10_000, "\ud800", "\x00", "x" * 100_000, [], {}, [[]], b"x"),
    *([{"priority": 1}] * 100, [{"priority": float("nan")}], [{"token_start": 10**400}], [None]),
    *([{1: 2}], nested(5000, dict), nested(5000, list), nested(900, dict), object(), {1}),
]


@pytest.mark.parametrize("name", [*NAMES, "nothing", "", "x" * 100_000, 7, None])
def test_whatever_comes_is_hints_or_a_short_refusal(name):
    """One bad request must not take kvferry out of service for all others."""
    for value in HOSTILE:
        hints, words = hints_of({"kvferry": {name: value}})
        assert hints == Hints() or not words
        assert len(words) < 600
        assert words.isprintable()


@pytest.mark.parametrize("params", [value for value in HOSTILE if value is not None])
def test_parameters_of_any_kind_are_borne(params):
    """Seen red: an AttributeError, for which kvferry was taken out of service."""
    desk = Desk(tenants="*")
    sent = request(kv_transfer_params=params, cache_salt=None)
    opened(desk.scheduler, sent).end()
    hints, words = hints_of(params)
    assert hints == Hints()
    if not isinstance(params, dict):
        assert "kv_transfer_params must be a mapping" in words


def test_a_mistake_of_ours_with_hints_is_the_hints_alone(monkeypatch):
    def broken(given: object) -> Hints:
        raise ZeroDivisionError

    monkeypatch.setattr(Hints, "read", broken)
    hints, words = hints_of({"kvferry": {"ended": True}})
    assert hints == Hints()
    assert words == "the hints of this request are not heeded: ZeroDivisionError"


def test_a_salt_is_a_tenant_where_tenants_are_told_apart():
    scheduler = Desk(tenants="*").scheduler
    salted = opened(scheduler, request(kv_transfer_params=None, cache_salt="s"))
    assert salted.hints == Hints(tenant=tenant_of("s"))
    named = {"kvferry": {"tenant": "search"}}
    both = opened(scheduler, request(kv_transfer_params=named, cache_salt="s"))
    assert both.hints == Hints(tenant="search")
    assert salted.tenant != both.tenant
    assert opened(scheduler, request()).tenant == 0


def test_unheeded_hints_are_explained_once_the_request_is_over():
    desk = Desk()
    chain = story(1, 2)
    asked = desk.scheduler.open("q", chain, Hints(), unheeded="not heeded: so and so")
    asked.match()
    asked.end()
    entry = desk.scheduler.journal("q")
    assert entry is not None
    assert entry.refused == ("not heeded: so and so",)


class Loop:
    """As vLLM's engine loop: what it calls can find its queue."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def run_busy_loop(self) -> Any:
        return find_waker()


def test_an_idle_engine_loop_is_found_and_woken(monkeypatch):
    types = SimpleNamespace(EngineCoreRequestType=SimpleNamespace(WAKEUP="wake"))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", types)
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    loop = Loop()
    loop.run_busy_loop()()
    assert loop.input_queue.get_nowait() == ("wake", None)
    find_waker()()  # no loop calls us: nothing is woken


def test_tokens_of_an_unknown_vllm_are_refused_in_words(monkeypatch):
    def fails(*_: object) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(control, "block_hasher", fails)
    tokens = VllmTokens(NAMESPACE, "sha256")
    assert len(tokens([], "")) == 0
    with pytest.raises(InputError, match="cannot be named by tokens"):
        tokens([1, 2, 3, 4], "")
