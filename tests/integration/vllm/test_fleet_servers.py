"""Two `vllm serve` that share nothing but a store: what one computed, the other loads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.vllm.engine import SHARED, make_prompts
from tests.integration.vllm.server import Server
from tests.integration.vllm.test_parallel import run_two_ranks

pytest.importorskip("obstore", reason="the extra s3 is not installed beside this vLLM")

from tests.fakes import remote, s3_servers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ferry() -> Iterator[dict[str, str]]:
    """Settings with a store that is empty and this test's own."""
    server = s3_servers.S3Server("rclone")
    server.start()
    with remote.environment(remote.CREDENTIALS):
        yield {
            **SHARED,
            "remote": f"s3://{s3_servers.BUCKET}/vllm?endpoint={server.endpoint}",
        }
    server.close()


@pytest.mark.soak
def test_what_one_server_computed_another_loads(expect, llama, ferry, tmp_path):
    prompts = make_prompts(71, *[200] * 4)
    with ThreadPoolExecutor() as at_once:
        starts = [
            at_once.submit(Server, llama, tmp_path / f"server{number}.log", ferry=ferry)
            for number in range(2)
        ]
        expected = expect(llama, prompts)
    first, second = (start.result() for start in starts)
    try:
        assert [first.tokens(prompt) for prompt in prompts] == expected
        # Six whole blocks of each prompt, four layers of keys and values in float32.
        written = 4 * 6 * 4 * 2 * (32 * 2 * 32 * 4)
        first.wait_for("vllm:kvferry_moved_bytes_total", written, dst="remote")
        assert first.metric("vllm:kvferry_promoted_tokens_total") == 0
        first.kill()  # with all of its memory: what the other finds it has from the store alone
        assert [second.tokens(prompt) for prompt in prompts] == expected
        second.wait_for("vllm:kvferry_promoted_tokens_total", 4 * 192)
        assert second.metric("vllm:kvferry_moved_bytes_total", src="remote") >= written
        assert second.metric("vllm:external_prefix_cache_hits_total") >= 4 * 192
        assert second.metric("vllm:kvferry_failed_transfers_total") == 0
        more = make_prompts(72, 200)
        assert second.tokens(more[0]) == expect(llama, more)[0]
    finally:
        for server in (first, second):
            server.kill()


@pytest.mark.soak
def test_another_tensor_parallel_size_finds_nothing_and_says_the_same(
    start, expect, llama, ferry, tmp_path
):
    """One store, the same model on one rank and on two: each finds its own and nothing else."""
    of_one, of_two = make_prompts(73, 200, 200), make_prompts(74, 200, 200)
    expected = expect(llama, of_one + of_two)
    alone = start(llama, ferry=ferry)
    alone.await_tiers()
    assert alone.generate(of_one) == expected[:2]
    alone.settle()
    assert alone.stats.bytes_moved["host", "remote"] > 0
    for found in ([0] * 4, [192] * 4):  # the second server of two ranks finds what the first had
        result, _ = run_two_ranks(tmp_path, llama, of_one + of_two, ferry)
        assert result["first"] == result["again"] == expected
        assert result["found"] == found
        assert result["figures"]["vllm:kvferry_failed_transfers"] == 0
        assert (result["figures"]["vllm:kvferry_found_blocks"] > 0) == (found[0] > 0)
    assert alone.generate(of_two) == expected[2:]
    assert alone.stats.promoted_tokens == 0
    assert alone.stats.hit_tokens == 0
