"""The library on a real card while its host memory grows: pinned, and not."""

from __future__ import annotations

import pytest

import kvferry

pytestmark = pytest.mark.gpu

BLOCKS, BLOCK_TOKENS = 128, 16


@pytest.mark.parametrize("host_pin", ["required", "never"])
def test_blocks_come_back_bit_for_bit_while_memory_grows(host_pin: str) -> None:
    import torch

    kv = [
        torch.randint(0, 255, (BLOCKS, 64 * 1024), dtype=torch.uint8, device="cuda")
        for _ in range(4)
    ]
    wanted = [layer.clone() for layer in kv]
    tables = list(range(BLOCKS))
    with kvferry.attach(
        kv,
        model="m",
        block_tokens=BLOCK_TOKENS,
        host="4GiB",
        host_pin=host_pin,
        load_policy="always",
    ) as ferry:
        for turn in range(4):
            keys = ferry.keys([turn + n for n in range(BLOCKS * BLOCK_TOKENS)])
            stored = ferry.wait(ferry.store(keys, tables), 30)
            assert stored.ok, stored.reason
            for layer in kv:
                layer.zero_()
            hit = ferry.match(keys)
            assert len(hit) == stored.num_blocks == BLOCKS
            loaded = ferry.wait(ferry.load(hit, tables), 30)
            assert loaded.ok, loaded.reason
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(kv, wanted, strict=True))
        assert ferry.host_stats().is_pinned == (host_pin == "required")
