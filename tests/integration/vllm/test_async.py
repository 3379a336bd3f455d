"""With asynchronous scheduling the next step is planned before the last one's tokens are known."""

from __future__ import annotations

import random

from tests.integration.vllm import asynchronous
from tests.integration.vllm.engine import FERRY, Engine, make_prompts
from tests.integration.vllm.reference import in_a_process


def start(model, **options):
    asynchronous.allow()
    engine = Engine(model, ferry=FERRY, async_scheduling=True, **options)
    assert asynchronous.is_asynchronous(engine)
    return engine


def test_prompts_and_answers_come_back(expect, llama):
    prompts = make_prompts(81, 100, 200, 300, 33, 31)
    answers = expect(llama, prompts, 70)
    more = make_prompts(82, *[20] * len(prompts))
    turns = [p + a + m for p, a, m in zip(prompts, answers, more, strict=True)]
    first, second, hit_tokens = in_a_process(two_turns, llama, prompts, turns)
    assert first == answers
    assert second == expect(llama, turns)
    # The last generated token was never fed back, so its KV may never have been computed.
    assert hit_tokens >= sum((len(p) + 70 - 1) // 32 * 32 for p in prompts)


def two_turns(model, prompts, turns):
    engine = start(model)
    first = engine.generate(prompts, max_tokens=70)
    engine.forget_device()
    second = engine.generate(turns)
    engine.check_idle()
    return first, second, engine.stats.hit_tokens


def test_preempted_requests_go_on_where_they_were(expect, llama):
    prompts = make_prompts(83, 60, 70, 80, 90)
    answers, num_preempted, loaded_blocks = in_a_process(asynchronous.crowd, llama, prompts, 18)
    assert answers == expect(llama, prompts, 120)
    assert num_preempted > 0
    assert loaded_blocks > 0


def test_aborts_and_resets_at_random_moments(expect, llama):
    chooser = random.Random(85)
    prompts = make_prompts(85, *[chooser.randrange(20, 400) for _ in range(20)])
    expected = expect(llama, prompts)
    done, loaded_blocks = in_a_process(disturbed, llama, prompts)
    assert len(done) > 20
    assert all(tokens == expected[number] for number, tokens in done)
    assert loaded_blocks > 0


def disturbed(model, prompts):
    chooser = random.Random(86)
    engine = start(model, num_gpu_blocks_override=48)
    done = []
    for _ in range(3):
        names = {engine.add(prompt): number for number, prompt in enumerate(prompts)}
        while engine.llm.llm_engine.has_unfinished_requests():
            finished = engine.step()
            done += [(names[n], tokens) for n, tokens in finished.items() if len(tokens) == 16]
            if chooser.random() < 0.05:
                engine.abort(chooser.choice(list(names)))
            if chooser.random() < 0.02:
                engine.llm.reset_prefix_cache(reset_connector=chooser.random() < 0.5)
        engine.check_idle()
    return done, engine.loaded_blocks
