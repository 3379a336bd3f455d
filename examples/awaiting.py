"""Loads and stores in an event loop: each request awaits its own tickets."""

import asyncio

import numpy as np

import kvferry

BLOCKS, BLOCK_TOKENS, REQUESTS = 64, 16, 8
rng = np.random.default_rng()
kv = [rng.random((BLOCKS, 2, BLOCK_TOKENS, 64), np.float32) for _ in range(4)]


async def serve(ferry: kvferry.Ferry, number: int) -> bool:
    keys = ferry.keys(rng.integers(0, 32_000, 4 * BLOCK_TOKENS))
    blocks = np.arange(4 * number, 4 * number + 4)
    saved = [layer[blocks].copy() for layer in kv]
    await ferry.store(keys, blocks)
    for layer in kv:
        layer[blocks] = 0  # the engine needed the room
    done = await ferry.load(ferry.match(keys), blocks)
    same = (np.array_equal(layer[blocks], old) for layer, old in zip(kv, saved, strict=True))
    return done.ok and all(same)


async def main() -> None:
    with kvferry.attach(kv, model="my-model", block_tokens=BLOCK_TOKENS, host="64MiB") as ferry:
        right = await asyncio.gather(*(serve(ferry, number) for number in range(REQUESTS)))
        print(f"{sum(right)} of {REQUESTS} requests have their blocks back")
        assert all(right)


asyncio.run(main())
