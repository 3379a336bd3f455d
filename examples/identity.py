"""What makes two blocks the same: tokens, and everything else that could change the bytes."""

from dataclasses import replace

from kvferry import Namespace, chain

namespace = Namespace(
    model="my-model",
    revision="a1b2c3",
    dtype="bfloat16",
    layout="layers-outermost",
    geometry={"layers": 28, "kv_heads": 4, "head_size": 128},
    overrides={"rope_theta": 1_000_000},
    block_tokens=4,
)
hello = chain(namespace, [1, 2, 3, 4, 5, 6, 7, 8, 9])
hi = chain(namespace, [1, 2, 3, 4, 5, 6, 7, 80])
print(f"{len(hello)} full blocks in 9 tokens")
print("same first block:   ", hello[0] == hi[0])
print("same second block:  ", hello[1] == hi[1])

# A key covers all tokens before it: the same tokens elsewhere are another block.
print("same, but later:    ", chain(namespace, [0, 0, 0, 0, 1, 2, 3, 4])[1] == hello[0])

# A conversation that goes on needs only its new tokens hashed.
longer = chain(namespace, [9, 10, 11, 12], parent=hello[1])
assert chain(namespace, range(1, 13)) == hello + longer

# Another tenant, other weights, another rope setting: nothing in common.
others = [
    replace(namespace, salt="tenant-2"),
    replace(namespace, revision="d4e5f6"),
    replace(namespace, overrides={"rope_theta": 10_000}),
    replace(namespace, epoch=namespace.epoch + 1),  # all kept so far is forgotten at once
]
shared = sum(key in set(hello) for other in others for key in chain(other, range(1, 9)))
print("shared with others: ", shared)
assert shared == 0

# Tokens that only stand for an image, an adapter of one request, a tenant: say it with the tokens.
tokens = range(1, 9)
requests = [
    hello,
    chain(namespace, tokens, extra={"images": ["sha256:5f2c"]}),
    chain(namespace, tokens, extra={"adapter": "sql-lora@3"}),
    chain(namespace, tokens, salt="tenant-2"),
]
print("equal tokens, keys: ", len({key for keys in requests for key in keys}))
assert len({key for keys in requests for key in keys}) == 4 * len(hello)
