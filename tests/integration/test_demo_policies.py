"""``kvferry demo --policies``: conversations that return late or never, policies in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvferry.cache.policies.contract import EvictionPolicy, Residents
from kvferry.cache.policies.lru import Lru
from kvferry.errors import InputError
from kvferry.tools.cli import demo as demo_module
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.demo.compare import (
    GAP_MEDIAN_SECONDS,
    GAP_TENTH_SECONDS,
    RETURN_CHANCES,
    ReturningChat,
    Turn,
)
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.policies import (
    PoliciesResult,
    PolicyFigures,
    PolicyTrial,
    run_policies,
)
from kvferry.tools.demo.report import policies_gain, policies_verdict

SHAPE = ModelShape(vocab=64, width=16, num_layers=1, num_heads=1, num_kv_heads=1, hidden=16)
CHAT = ReturningChat(num_turns=60, opening_tokens=40, question_tokens=10, vocab=64)


def small(chat: ReturningChat = CHAT, **changes: Any) -> PolicyTrial:
    trial = PolicyTrial(chat, SHAPE, num_uncounted=20, host_blocks=24, device_blocks=24)
    return replace(trial, **changes)


def turn(number: int, seconds: float, host: int = 0) -> Turn:
    return Turn(0, number, 100, 0, host, 100 - host, seconds)


def result(first: Sequence[Turn], last: Sequence[Turn], different: int = 0) -> PoliciesResult:
    figures = {
        name: PolicyFigures(name, turns, [turn.first_token_seconds for turn in turns])
        for name, turns in (("lru", first), ("returns", last))
    }
    return PoliciesResult(small(), figures, different)


def test_returns_are_spread_like_a_services() -> None:
    chat = ReturningChat(num_turns=20_000)
    arrivals = chat.arrivals()
    assert arrivals == sorted(arrivals) == chat.arrivals()
    assert len(arrivals) == 20_000
    assert arrivals != replace(chat, seed=1).arrivals()
    times: dict[int, list[float]] = {}
    for seconds, conversation, number in arrivals:
        assert number == len(times.setdefault(conversation, []))
        times[conversation].append(seconds)
    early = [each for each in times.values() if each[0] < arrivals[-1].seconds / 2]
    for number, chance in enumerate(RETURN_CHANCES[:4], start=1):
        had = [len(each) > number for each in early if len(each) >= number]
        assert np.mean(had) == pytest.approx(chance, abs=0.05)
    gaps = np.concatenate([np.diff(each) for each in early])
    assert np.median(gaps) == pytest.approx(GAP_MEDIAN_SECONDS, rel=0.1)
    assert np.percentile(gaps, 10) == pytest.approx(GAP_TENTH_SECONDS, rel=0.1)


def test_policies_serve_the_same_turns_in_turn_with_the_same_answers() -> None:
    told: list[tuple[int, int]] = []
    found = run_policies(small(), lambda number, total: told.append((number, total)))
    assert told == [(number, 60) for number in range(1, 61)]
    assert found.tokens_equal
    asked = [(number, turn) for _, number, turn in CHAT.arrivals()[20:]]
    assert list(found.figures) == ["lru", "returns"]
    for figures in found.figures.values():
        assert [(each.conversation, each.turn) for each in figures.turns] == asked
        for each in figures.turns:  # every prompt token was found or computed, once
            found_tokens = each.device_tokens + each.host_tokens
            assert found_tokens + each.prefilled_tokens == each.prompt_tokens


def test_a_policy_goes_by_the_services_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[float] = set()

    class Watching(Lru):
        def __init__(self, residents: Residents) -> None:
            super().__init__(residents)
            self._now = residents.now

        def insert(self, slots: Any) -> None:
            seen.add(self._now())
            super().insert(slots)

    def make(residents: Residents) -> EvictionPolicy:
        return Watching(residents)

    module = ModuleType("policy_that_watches")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_policies(small(policies=("policy_that_watches:make",)))
    asked = {arrival.seconds for arrival in CHAT.arrivals()}
    assert len(seen) > len(asked) / 2
    assert seen <= asked


def test_where_conversations_return_late_learning_when_computes_less() -> None:
    shape = replace(SHAPE, vocab=256)
    found = run_policies(PolicyTrial(shape=shape))
    assert found.tokens_equal
    lru, returns = found.figures["lru"], found.figures["returns"]
    assert returns.prefill_tokens < lru.prefill_tokens
    assert returns.host_hit_rate > lru.host_hit_rate


def test_words_follow_the_figures() -> None:
    slow, fast = [turn(0, 0.1), turn(1, 0.1)], [turn(0, 0.1), turn(1, 0.05, host=80)]
    words = policies_gain(result(slow, fast))
    assert "120 prefill tokens were computed instead of 200, 40% less" in words
    assert "40.0% of the prompt tokens, with lru 0.0%" in words
    assert "the processor worked 50% less in the mean" in words
    words = policies_gain(result(fast, slow))
    assert "200 prefill tokens were computed instead of 120, 67% more" in words
    assert "the processor worked 100% more" in words
    words = policies_gain(result(slow, slow))
    assert words.count("about as much") == 2


def test_the_report_has_them_and_wrong_answers_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html, figures = tmp_path / "report.html", tmp_path / "figures.json"
    monkeypatch.setattr(demo_module, "PolicyTrial", small_trial)
    command = [
        *("demo", "--policies", "--conversations", "3", "--turns", "2", "--users", "1"),
        *("--opening-tokens", "40", "--question-tokens", "9", "--answer-tokens", "3"),
        *("--seed", "7", "--html", str(html), "--json", str(figures)),
    ]
    found = CliRunner().invoke(kvferry, command)
    assert found.exit_code == 0, found.output
    assert "All 60 answers are identical with the policies lru and returns." in found.output
    told = json.loads(figures.read_text())["policies"]
    assert told["tokens_equal"] is True
    assert told["setting"]["seed"] == 7
    for name in ("lru", "returns"):
        assert told["policies"][name]["prefill_tokens_computed"] > 0
        assert f"{told['policies'][name]['prefill_tokens_computed']:,}" in found.output
        assert 0 <= told["policies"][name]["hit_rate"]["host"] <= 1
    page = html.read_text()
    assert "Which blocks are kept" in page
    assert "Processor&#x27;s time to the first token of returns, mean" in page

    bad = result([turn(1, 0.1)], [turn(1, 0.1)], different=2)
    assert "2 of 60 answers differ" in policies_verdict(bad)
    monkeypatch.setattr(demo_module, "run_policies", lambda trial, on_served: bad)
    found = CliRunner().invoke(kvferry, command)
    assert found.exit_code == 1
    assert "FAILED 2 of 60 answers differ" in found.output


def small_trial(chat: ReturningChat) -> PolicyTrial:
    return small(replace(CHAT, seed=chat.seed))


def test_a_trial_in_which_nobody_returns_is_refused() -> None:
    with pytest.raises(InputError, match="give more turns"):
        small(num_uncounted=60)
    with pytest.raises(InputError, match="new_per_second must be above 0"):
        ReturningChat(new_per_second=0)
