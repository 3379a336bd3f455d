"""A tier below host memory: conversations that host memory had to drop come back from there.

Host memory is made far too small on purpose. A hit whose blocks lie below is pending at first: they
are brought up while you poll.
"""

import numpy as np

import kvferry

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 4, 64, 16, 2, 64
CHATS, CHAT_BLOCKS = 10, 6
rng = np.random.default_rng()
kv = [rng.random((BLOCKS, 2, BLOCK_TOKENS, HEADS, DIM), np.float32) for _ in range(LAYERS)]
block_bytes = sum(layer[0].nbytes for layer in kv)
chats = [rng.integers(0, 32_000, CHAT_BLOCKS * BLOCK_TOKENS) for _ in range(CHATS)]

with kvferry.attach(
    kv,
    model="my-model",
    block_tokens=BLOCK_TOKENS,
    host=24 * block_bytes,  # four conversations of ten
    tiers="memory:64MiB",  # a store of your own: tiers="my_package.module:factory"
    load_policy="always",
) as ferry:
    first = list(range(CHAT_BLOCKS))
    saved = [layer[first].copy() for layer in kv]
    for number, tokens in enumerate(chats):
        blocks = [number * CHAT_BLOCKS + block for block in first]
        ferry.wait(ferry.store(ferry.keys(tokens), blocks))
        while ferry.stats().in_flight:  # an engine polls once a step, and the rest goes by itself
            ferry.poll()

    hit = ferry.match(ferry.keys(chats[0]))
    print(f"at first: {len(hit)} blocks, pending: {hit.is_pending}")
    hit = ferry.await_hit(hit)  # an engine would go on with other requests, and ask with timeout=0
    done = ferry.wait(ferry.load(hit, range(58, 58 + len(hit))))
    same = all(np.array_equal(layer[58:64], old) for layer, old in zip(kv, saved, strict=True))
    print(f"later: {len(hit)} blocks came back, ok={done.ok}, bytes equal: {same}")
    down = ferry.stats().bytes_moved["host", "memory"] // block_bytes
    print(f"{down} blocks went down to make room")
    assert same
    assert len(hit) == CHAT_BLOCKS
