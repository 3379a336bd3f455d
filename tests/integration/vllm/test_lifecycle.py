"""Requests that end early, copies that take long, and our own mistakes: vLLM goes on."""

from __future__ import annotations

import pytest
from tests.integration.vllm.engine import FERRY as COPIES
from tests.integration.vllm.engine import make_prompts, tampering

from kvferry.scheduler.request import Request

FERRY = {
    **COPIES,
    "overlap_loads": "off",  # requests here wait for their loads; others are in test_overlap.py
}


def waiting_for_load(engine, name):
    request = engine.scheduler.requests.get(engine_name(engine, name))
    return request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS"


def engine_name(engine, name):
    """vLLM may add a suffix to a request's name."""
    return next((known for known in engine.scheduler.requests if known.startswith(name)), name)


def test_a_request_aborted_while_it_loads(start, expect, llama, monkeypatch):
    prompts = make_prompts(21, 300, 200)
    expected = expect(llama, prompts)
    with tampering(monkeypatch) as tampers:
        engine = start(llama, ferry=FERRY)
    engine.generate(prompts)
    engine.forget_device()
    tampers[0].holds_receipts = True
    names = [engine.add(prompt) for prompt in prompts]
    for _ in range(3):
        engine.step()
    assert all(waiting_for_load(engine, name) for name in names)
    engine.abort(names[0])
    engine.step()
    tampers[0].holds_receipts = False
    assert engine.run()[names[1]] == expected[1]
    engine.check_idle()
    assert engine.generate(prompts) == expected
    engine.check_idle()


def test_a_request_aborted_while_its_blocks_are_stored(start, expect, llama, monkeypatch):
    prompts = make_prompts(22, 300, 200)
    expected = expect(llama, prompts)
    with tampering(monkeypatch) as tampers:
        engine = start(llama, ferry=FERRY)
    tampers[0].holds_receipts = True
    names = [engine.add(prompt) for prompt in prompts]
    for _ in range(3):
        engine.step()
    assert engine.side.serving.engine.num_held > 0
    engine.abort(names[0])
    assert engine.run()[names[1]] == expected[1]
    assert not engine.llm.reset_prefix_cache(), "stores in flight must keep their blocks"
    tampers[0].holds_receipts = False
    engine.forget_device()
    assert engine.generate(prompts) == expected
    assert engine.loaded_blocks > 0
    engine.check_idle()


def test_no_request_is_preempted_for_blocks_that_a_store_gives_back(
    start, expect, llama, monkeypatch
):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if not hasattr(KVConnectorBase_V1, "has_pending_block_frees"):
        pytest.skip("this vLLM preempts without asking")
    first, second = make_prompts(29, 200, 220)
    expected = expect(llama, [second], 60)
    with tampering(monkeypatch) as tampers:
        engine = start(llama, ferry=FERRY, num_gpu_blocks_override=15, max_model_len=320)
    preempted = engine.note_preemptions(monkeypatch)
    tampers[0].holds_receipts = True
    engine.generate([first], max_tokens=1)
    while engine.side.serving.scheduler.deferred:
        engine.step()
    assert engine.side.serving.engine.num_held == 6  # of 14, and the next needs 7, then 9
    name = engine.add(second, 60)
    for _ in range(80):
        assert not engine.step()
    assert engine.connector.has_pending_block_frees()
    tampers[0].holds_receipts = False
    assert engine.run()[name] == expected[0]
    assert not preempted
    engine.check_idle()


def test_a_mistake_of_ours_never_stops_the_engine(start, expect, llama, monkeypatch):
    prompts = make_prompts(25, 300, 200, 250)
    expected = expect(llama, prompts)
    engine = start(llama, ferry=FERRY)
    assert engine.generate(prompts) == expected
    engine.forget_device()

    def mistaken(*args, **kwargs):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Request, "load", mistaken)
    assert engine.generate(prompts) == expected
    engine.settle()  # what a request leaves is stored when there is nothing else to do
    assert "a mistake" in engine.side.guard.reason
    assert engine.generate(prompts) == expected
    for _ in range(5):
        engine.generate([[1, 2, 3]])
    assert engine.side.serving is None
    assert engine.side.former.engine.num_held == 0
    assert engine.llm.reset_prefix_cache()
    assert engine.generate(prompts) == expected


def test_tensors_we_cannot_describe_leave_kvferry_idle(start, expect, llama, monkeypatch):
    from kvferry.connectors.vllm import connector
    from kvferry.errors import LayoutError

    prompts = make_prompts(26, 200)
    expected = expect(llama, prompts)

    def refuse(*args):
        raise LayoutError("strange tensors")

    monkeypatch.setattr(connector, "kv_cache_of", refuse)
    engine = start(llama, ferry=FERRY)
    assert engine.generate(prompts) == expected
    assert "strange tensors" in engine.side.refusal
    assert engine.side.banner().startswith("kvferry is idle")


def test_an_unknown_setting_is_refused_with_the_nearest_name(start, llama):
    with pytest.raises(Exception, match="did you mean 'host'"):
        start(llama, ferry={"hosts": "1GiB"})


def test_loaded_by_module_path_too(start, llama, monkeypatch):
    from vllm import LLM

    real = LLM.__init__

    def by_path(self, *args, kv_transfer_config, **kwargs):
        kv_transfer_config["kv_connector"] = "KvferryConnector"
        kv_transfer_config["kv_connector_module_path"] = "kvferry.connectors.vllm.connector"
        real(self, *args, kv_transfer_config=kv_transfer_config, **kwargs)

    monkeypatch.setattr(LLM, "__init__", by_path)
    engine = start(llama, is_fresh=True, ferry=FERRY)
    prompts = make_prompts(28, 200)
    expected = engine.generate(prompts)
    engine.forget_device()
    assert engine.generate(prompts) == expected
    assert engine.loaded_blocks == 6
