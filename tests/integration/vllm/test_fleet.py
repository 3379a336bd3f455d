"""Two engines of a real vLLM, one after the other, that share nothing but a store."""

from __future__ import annotations

import pytest
from tests.integration.vllm.engine import SHARED, make_prompts

pytest.importorskip("obstore", reason="the extra s3 is not installed beside this vLLM")

from tests.fakes import remote, s3_servers


@pytest.fixture
def store():
    server = s3_servers.S3Server("rclone")
    server.start()
    with remote.environment(remote.CREDENTIALS):
        yield server
    server.close()


def test_what_one_engine_computed_another_loads(start, expect, llama, store):
    prompts = make_prompts(31, *[200] * 4)
    expected = expect(llama, prompts)
    address = f"s3://{s3_servers.BUCKET}/vllm?endpoint={store.endpoint}"
    ferry = {**SHARED, "remote": address}
    first = start(llama, ferry=ferry)
    first.await_tiers()
    assert first.generate(prompts) == expected
    first.settle()
    assert first.stats.bytes_moved["host", "remote"] > 0
    second = start(llama, ferry=ferry)
    second.await_tiers()
    assert second.generate(prompts) == expected
    assert second.stats.bytes_moved["remote", "host"] > 0
    assert second.stats.hit_tokens >= 4 * 192
    store.kill()  # in the middle of its life: what it has not yet loaded is computed
    more = make_prompts(32, *[200] * 4)
    assert second.generate(more) == expect(llama, more)
