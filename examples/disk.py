"""Blocks on disk: a second process-life finds what the first one left.

Here both lives are in one program; a server that starts again does the same. ``tier_write`` is
"through", so that every block is on disk as soon as it is stored, and not only when host memory has
to drop it.
"""

import tempfile

import numpy as np

import kvferry

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 4, 32, 16, 2, 64
CHAT_BLOCKS = 6
rng = np.random.default_rng()
tokens = rng.integers(0, 32_000, CHAT_BLOCKS * BLOCK_TOKENS)


def attach(kv: list[np.ndarray], folder: str) -> kvferry.Ferry:
    return kvferry.attach(
        kv,
        model="my-model",
        revision="2026-11-16",  # another for other weights: kvferry does not see them
        block_tokens=BLOCK_TOKENS,
        host="8MiB",
        disk=folder,  # or a list, one for each drive
        disk_size="64MiB",
        disk_keep_free=0,
        tier_write="through",
        load_policy="always",
    )


with tempfile.TemporaryDirectory() as folder:
    kv = [rng.random((BLOCKS, 2, BLOCK_TOKENS, HEADS, DIM), np.float32) for _ in range(LAYERS)]
    saved = [layer[:CHAT_BLOCKS].copy() for layer in kv]
    with attach(kv, folder) as ferry:
        ferry.wait(ferry.store(ferry.keys(tokens), range(CHAT_BLOCKS)))
        while ferry.stats().tiers["disk"].cached < CHAT_BLOCKS:  # an engine polls once a step
            ferry.poll()

    kv = [np.zeros_like(layer) for layer in kv]
    with attach(kv, folder) as ferry:
        print(f"{ferry.stats().restored['disk']} blocks were found on disk")
        hit = ferry.await_hit(ferry.match(ferry.keys(tokens)))
        done = ferry.wait(ferry.load(hit, range(10, 10 + len(hit))))
        same = all(np.array_equal(layer[10:16], old) for layer, old in zip(kv, saved, strict=True))
        print(f"{len(hit)} blocks came back, ok={done.ok}, bytes equal: {same}")
        assert same
        assert len(hit) == CHAT_BLOCKS
