"""One server of a fleet, as small as can be: stores a conversation, or asks for it, and says what
came. A program: every server is a process of its own.

``python -m tests.integration.one_of_a_fleet store|load SEED MODEL`` with the settings in the
environment.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np

import kvferry

BLOCKS, BLOCK_TOKENS = 12, 16
SECONDS = 30.0  # far more than a store takes: on a busy machine, too


def main() -> None:
    what, seed, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rng = np.random.default_rng(seed)
    contents = [rng.random((BLOCKS, 2, BLOCK_TOKENS, 8, 32), np.float32) for _ in range(3)]
    kv = [np.zeros_like(layer) if what == "load" else layer for layer in contents]
    tokens = rng.integers(0, 32_000, BLOCKS * BLOCK_TOKENS)
    with kvferry.attach(
        kv,
        model=model,
        block_tokens=BLOCK_TOKENS,
        host="16MiB",
        tier_write="through",
        load_policy="always",
        lookup_deadline=SECONDS,
        promote_deadline=SECONDS,
    ) as ferry:
        keys = ferry.keys(tokens)
        num_hit = 0
        ferry.poll()
        end = time.monotonic() + SECONDS
        while any(ferry.stats().ailments.values()) and time.monotonic() < end:
            time.sleep(0.01)
            ferry.poll()
        if what == "store":
            ferry.wait(ferry.store(keys, range(BLOCKS)))
            end = time.monotonic() + SECONDS
            while ferry.stats().in_flight and time.monotonic() < end:
                ferry.poll()
        else:
            hit = ferry.await_hit(ferry.match(keys))
            num_hit = len(hit)
            if num_hit:
                assert ferry.wait(ferry.load(hit, range(num_hit))).ok
        moved = {f"{a}-{b}": n for (a, b), n in ferry.stats().bytes_moved.items()}
    digest = hashlib.sha256(b"".join(layer[:num_hit].tobytes() for layer in kv)).hexdigest()
    wanted = hashlib.sha256(b"".join(layer[:num_hit].tobytes() for layer in contents)).hexdigest()
    print(json.dumps({"hit": num_hit, "is_right": digest == wanted, "moved": moved}))


if __name__ == "__main__":
    main()
