"""Two `vllm serve` on one Mooncake store, in whose memory both have a part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from tests.fakes import mooncake_store, remote
from tests.integration.vllm.engine import SHARED, make_prompts
from tests.integration.vllm.server import Server

FERRY = {**SHARED, "promote_deadline": "30s", "lookup_deadline": "30s"}
PROMPTS = 4
FOUND = 192  # of the 200 tokens of each prompt: six whole blocks
WRITTEN = PROMPTS * 6 * 4 * 2 * (32 * 2 * 32 * 4)  # four layers of keys and values in float32

AWAY, PROMOTED = "vllm:kvferry_tier_unavailable", "vllm:kvferry_promoted_tokens_total"
MOVED = "vllm:kvferry_moved_bytes_total"

pytestmark = [
    pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking()),
    pytest.mark.timeout(900),
]


@pytest.fixture
def master() -> Iterator[mooncake_store.Master]:
    made = mooncake_store.Master(client_ttl=30)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def at_once() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def servers(
    master: mooncake_store.Master, llama: Path, tmp_path: Path, at_once: ThreadPoolExecutor
) -> Iterator[tuple[Server, Server]]:
    ferry = {**FERRY, "remote": f"mooncake://{master.place}?segment=16MiB"}
    # The seed: before 0.29 vLLM names the same blocks alike in two servers only with one.
    with remote.environment({**mooncake_store.environment(), "PYTHONHASHSEED": "0"}):
        starts = [
            at_once.submit(Server, llama, tmp_path / f"server{number}.log", ferry=ferry)
            for number in range(2)
        ]
        wait(starts)
    try:
        first, second = (start.result() for start in starts)
        yield first, second
    finally:
        for start in starts:
            if start.exception() is None:
                start.result().kill()


def share(writer: Server, reader: Server, expect, llama: Path, seed: int) -> bool:
    """Whether all that the one computes is there for the other; both say what they should."""
    prompts = make_prompts(seed, *[200] * PROMPTS)
    expected = expect(llama, prompts)
    written, promoted = writer.counted(MOVED, dst="remote"), reader.counted(PROMOTED)
    assert [writer.tokens(prompt) for prompt in prompts] == expected
    writer.reaches(MOVED, written + WRITTEN, seconds=10.0, dst="remote")
    assert [reader.tokens(prompt) for prompt in prompts] == expected
    return reader.reaches(PROMOTED, promoted + PROMPTS * FOUND, seconds=10.0)


def test_two_servers_share_a_store_whose_master_dies_and_comes_back(
    expect, llama, master, servers, at_once
):
    first, second = servers
    prompts = make_prompts(81, *[200] * PROMPTS)
    expected = expect(llama, prompts)
    assert [first.tokens(prompt) for prompt in prompts] == expected
    first.wait_for(MOVED, WRITTEN, dst="remote")
    assert first.metric(PROMOTED) == 0
    assert [second.tokens(prompt) for prompt in prompts] == expected
    second.wait_for(PROMOTED, PROMPTS * FOUND)
    second.wait_for(MOVED, WRITTEN, src="remote")
    second.wait_for("vllm:external_prefix_cache_hits_total", PROMPTS * FOUND)
    assert second.metric("vllm:kvferry_failed_transfers_total") == 0

    during = make_prompts(82, *[200] * PROMPTS)
    said = [at_once.submit(server.tokens, prompt) for prompt in during for server in servers]
    master.kill()  # in the midst of it
    true = expect(llama, during)
    assert [answer.result() for answer in said] == [answer for answer in true for _ in servers]
    (alone,) = make_prompts(80, 200)
    assert [server.tokens(alone) for server in servers] == expect(llama, [alone]) * 2
    for server in servers:
        server.wait_for(AWAY, 1, tier="remote")

    master.start()
    for server in servers:
        server.wait_for(AWAY, 0, most=0, tier="remote")
    # Calls of before may still fail, and with them what is shared just then.
    assert any(share(second, first, expect, llama, seed) for seed in range(83, 88))

    first.kill()  # with its part of the memory
    first.wait_until_gone()
    assert [second.tokens(prompt) for prompt in prompts + during] == expected + true
    second.terminate()
    second.wait_until_gone()
