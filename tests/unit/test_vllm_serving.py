"""kvferry in vLLM's scheduler, without vLLM."""

from __future__ import annotations

from tests.fakes.vllm_side import FakeVllm

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def test_whoever_asks_from_another_thread_changes_nothing() -> None:
    """Seen red: a scrape counted misses, and went on with rests, beside the engine's thread."""
    vllm = FakeVllm()
    serving = vllm.serving
    serving.reports._serve("127.0.0.1", 0)
    request = vllm.request("a", HASHES[:3])
    assert vllm.side.match(request, 0) == (0, False)
    ferried = serving._tracked["a"].ferried
    assert ferried.is_owing
    try:
        source = serving.reports._endpoint._source  # the engine does not come by: it looks itself
        assert source.snapshot().stats.queries == 0
        assert source.recent() == []
        assert source.explain("a") is None
        assert ferried.is_owing
        vllm.allocate(request)
        vllm.orders({"a": 49}, new=["a"])
    finally:
        vllm.side.close()
    assert not ferried.is_owing
    assert serving.scheduler.onlooker.stats().queries == 1
