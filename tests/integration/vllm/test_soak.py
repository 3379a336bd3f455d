"""Conversations at random, few device blocks, little host memory, failing copies: all right."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest
from tests.fakes.overlap import overlap_every_load
from tests.integration.vllm.engine import make_prompts, tampering

from kvferry.transfer.engine.cpu import CpuEngine

SECONDS = float(os.environ.get("KVFERRY_TEST_SOAK_SECONDS", "600"))
FERRY = {
    "host": "6MiB",
    "load_policy": "always",
    "load_deadline": "5min",
    "store_deadline": "5min",
}
MAX_TOKENS = 24
TURNS = 4


def conversations(expect, model, count):
    """Turns of growing length with the answers a plain vLLM gives."""
    prompts = make_prompts(71, *[random.Random(n).randrange(20, 150) for n in range(count)])
    (shared,) = make_prompts(72, 64)
    prompts = [shared + p if n % 3 == 0 else p for n, p in enumerate(prompts)]
    turns: list[tuple[list[int], list[int]]] = []
    for turn in range(TURNS):
        answers = expect(model, prompts, MAX_TOKENS)
        turns += zip(prompts, answers, strict=True)
        more = make_prompts(73 + turn, *[40] * count)
        prompts = [p + a + m for p, a, m in zip(prompts, answers, more, strict=True)]
    return turns


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "overlap"), [("llama", "off"), ("llama", "auto"), ("gemma_hits", "off")]
)
def test_no_wrong_token(start, expect, request, monkeypatch, kind, overlap):
    """With ``auto`` all requests run while their loads land, at any pace."""
    model = request.getfixturevalue(kind)
    chooser = random.Random(74)
    if overlap == "auto":
        overlap_every_load(monkeypatch)
    real_load = CpuEngine._load_part

    def at_any_pace(engine, part):
        time.sleep(chooser.choice((0, 0, 0, 0.002, 0.01)))
        real_load(engine, part)

    monkeypatch.setattr(CpuEngine, "_load_part", at_any_pace)
    turns = conversations(expect, model, 24)
    blocks = 26 if kind == "llama" else 130
    with tampering(monkeypatch, fails=lambda transfer: chooser.random() < 0.05) as tampers:
        ferry = {**FERRY, "overlap_loads": overlap}
        engine = start(model, ferry=ferry, num_gpu_blocks_override=blocks)
    seen: Counter[str] = Counter()
    real = engine.scheduler._preempt_request

    def counted(*args, **kwargs):
        seen["preempted"] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counted)
    running: dict[str, list[int]] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or running:
        while len(running) < 8 and time.monotonic() < end:
            prompt, answer = chooser.choice(turns)
            running[engine.add(prompt, MAX_TOKENS)] = answer
        for name, tokens in engine.step().items():
            answer = running.pop(name, None)
            if answer is not None:
                assert tokens == answer, f"wrong tokens after {seen}"
                seen["right"] += 1
        tampers[0].holds_receipts = chooser.random() < 0.3
        if running and chooser.random() < 0.01:
            name = chooser.choice(list(running))
            del running[name]
            engine.abort(name)
            seen["aborted"] += 1
        if chooser.random() < 0.001:
            seen["reset"] += engine.llm.reset_prefix_cache(reset_connector=chooser.random() < 0.3)
    tampers[0].holds_receipts = False
    engine.check_idle()
    seen["loaded"] = engine.loaded_blocks
    seen["failed"] = tampers[0].num_failed
    seen["evicted"] = engine.stats.pool.evicted
    seen["overlapped"] = engine.stats.overlaps.get("alone", 0)
    print(dict(seen))
    assert all(seen[what] for what in ("right", "aborted", "loaded", "failed", "evicted"))
    assert seen["preempted"] or kind != "llama"
    assert seen["overlapped"] or overlap == "off"
