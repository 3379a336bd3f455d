"""Keep KV blocks in host memory and bring them back: the whole library in twenty lines."""

import numpy as np

import kvferry

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 4, 32, 16, 2, 64
rng = np.random.default_rng()
kv = [rng.random((BLOCKS, 2, BLOCK_TOKENS, HEADS, DIM), np.float32) for _ in range(LAYERS)]
tokens = rng.integers(0, 32_000, 100)  # six full blocks and a bit

with kvferry.attach(kv, model="my-model", block_tokens=BLOCK_TOKENS, host="64MiB") as ferry:
    keys = ferry.keys(tokens)
    ferry.wait(ferry.store(keys, [3, 1, 4, 15, 9, 2]))
    saved = [layer[[3, 1, 4, 15, 9, 2]].copy() for layer in kv]

    for layer in kv:
        layer[:] = 0  # the engine needed the room

    hit = ferry.match(ferry.keys(tokens))
    done = ferry.wait(ferry.load(hit, [20, 21, 22, 23, 24, 25]))
    same = all(np.array_equal(layer[20:26], old) for layer, old in zip(kv, saved, strict=True))
    print(f"{len(hit)} blocks came back, ok={done.ok}, bytes equal: {same}")
    assert same
    assert len(hit) == 6
