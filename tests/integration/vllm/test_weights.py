"""KV of weights that are no more must never be loaded, however they were replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.integration.vllm import models
from tests.integration.vllm.engine import BLOCK_TOKENS, FERRY, make_prompts

from kvferry.connectors.common.weights import Freshness, Weights
from kvferry.connectors.vllm.connector import _RESTORES
from kvferry.connectors.vllm.control import weights_of_caller


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The same model after some training."""
    return models.make_llama(tmp_path_factory.mktemp("models") / "trained", seed=7)


def replace_weights(engine, model):
    engine.is_spoiled = True
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def test_weights_replaced_without_a_word_are_noticed(start, expect, llama, trained):
    prompts = make_prompts(91, 100, 200, 300)
    new = expect(trained, prompts)
    engine = start(llama, ferry=FERRY)
    assert engine.generate(prompts) == expect(llama, prompts) != new
    engine.forget_device()
    replace_weights(engine, trained)
    assert engine.generate(prompts) == new
    assert engine.stats.resets == 1
    assert engine.stats.failed > 0
    engine.forget_device()
    before = engine.stats.hit_tokens
    assert engine.generate(prompts) == new
    assert engine.stats.hit_tokens - before == (3 + 6 + 9) * BLOCK_TOKENS
    assert engine.stats.resets == 1
    engine.check_idle()


def sleep(engine):
    engine.is_spoiled = True
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def pause(engine):
    """As ``/pause`` does it, unless it is told to keep the caches."""
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()


@pytest.mark.parametrize("what", [sleep, pause])
def test_sleep_and_pause_forget_the_host(start, llama, what):
    prompts = make_prompts(94, 200)
    engine = start(llama, ferry=FERRY)
    expected = engine.generate(prompts)
    engine.step()
    assert engine.connector.has_pending_push_work(), "a store is under way, and nobody waits for it"
    what(engine)
    assert engine.stats.resets == int(what is pause or not _RESTORES)
    assert engine.stats.pool.cached == 0
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == 0
    engine.forget_device()
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == 6 * BLOCK_TOKENS
    engine.check_idle()


@pytest.mark.skipif(not _RESTORES, reason="this vLLM does not say when device memory is back")
def test_a_sleep_keeps_the_host(start, llama):
    prompts = make_prompts(96, 200)
    engine = start(llama, ferry=FERRY)
    expected = engine.generate(prompts)
    engine.settle()
    sleep(engine)
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == 6 * BLOCK_TOKENS
    assert engine.stats.resets == 0
    engine.check_idle()


class FakeWeights(Weights):
    def __init__(self):
        self.value = 1
        self.looks = 0
        self.fails = False

    def mark(self):
        self.looks += 1

    def begin(self):
        if self.fails:
            raise RuntimeError("gone")
        value = self.value
        return SimpleNamespace(result=lambda: (value,))


def load(freshness, epoch):
    """A step that loads; whether its blocks may be used."""
    freshness.enter(epoch)
    if freshness.is_stale(epoch):
        return False
    freshness.mark()
    freshness.look()
    return not freshness.is_stale(epoch)


def taken(freshness):
    """The epochs that the rank reports now."""
    stale, freshness.unreported = freshness.unreported, ()
    return stale


def test_loads_of_a_stale_epoch_fail_until_the_scheduler_has_heard():
    weights = FakeWeights()
    freshness = Freshness(weights)
    assert load(freshness, 0)
    weights.value = 2
    assert not load(freshness, 0)
    assert not load(freshness, 0), "planned before the scheduler's side heard of it"
    assert taken(freshness) == (0,)
    assert taken(freshness) == ()
    assert load(freshness, 1)
    weights.value = 3
    freshness.enter(2)  # a reset that came with the update
    assert load(freshness, 2)
    assert taken(freshness) == ()


def test_weights_that_cannot_be_read_any_more_are_stale_once():
    weights = FakeWeights()
    freshness = Freshness(weights)
    assert load(freshness, 0)
    weights.fails = True
    assert not load(freshness, 0)
    assert taken(freshness) == (0,)
    assert load(freshness, 1)
    assert taken(freshness) == ()


def test_steps_that_load_nothing_look_at_nothing():
    weights = FakeWeights()
    freshness = Freshness(weights)
    for _ in range(10):
        freshness.enter(0)
        freshness.look()
    assert weights.looks == 1


def module_of(**parts):
    module = torch.nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def parameter(*shape):
    return torch.nn.Parameter(torch.randn(shape), requires_grad=False)


def layer(**parts):
    return module_of(qkv=module_of(weight=parameter(12, 8)), **parts)


def look(model):
    """The sums a rank would take of this model now, found as it finds them."""
    runner = SimpleNamespace(get_model=lambda: model)

    def register(self):
        return weights_of_caller(torch.device("cpu"))

    return register(runner).begin().result()


def test_experts_that_change_their_places_are_no_update():
    """Their scales and biases move with them, and are matrices: a row for each expert."""
    experts = module_of(w13_weight=parameter(4, 6, 8), w13_weight_scale=parameter(4, 2))
    experts = module_of(routed_experts=experts)
    model = module_of(layers=torch.nn.ModuleList([layer(), layer(experts=experts)]))
    before = look(model)
    for weight in experts.parameters():  # others come from another rank
        weight.copy_(torch.randn(weight.shape))
    assert look(model) == before
    model.layers[1].qkv.weight.add_(1)
    assert look(model) != before


def test_memory_that_several_layers_take_turns_in_is_not_looked_at():
    """vLLM can keep weights in host memory, and bring each layer's when its turn comes."""
    model = module_of(layers=torch.nn.ModuleList([layer() for _ in range(4)]))
    buffer = torch.randn(12, 8)
    for number in (1, 3):
        model.layers[number].qkv.weight.data = buffer
    before = look(model)
    buffer.copy_(torch.randn(12, 8))
    assert look(model) == before
    model.layers[2].qkv.weight.add_(1)
    assert look(model) != before


def test_encoders_of_many_kinds_do_not_hide_the_language_model():
    kinds = {f"part_{chr(97 + n)}": module_of(weight=parameter(4, 4)) for n in range(12)}
    model = module_of(visual=module_of(**kinds), language_model=module_of(layers=layer()))
    before = look(model)
    model.language_model.layers.qkv.weight.add_(1)
    assert look(model) != before
