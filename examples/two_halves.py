"""The two halves as a real server runs them: one scheduler, two ranks, pickled plans between.

The scheduler knows keys and requests but no bytes; each rank's worker knows bytes but no keys. A
block can be matched only once every rank has confirmed it.
"""

import pickle

import numpy as np

from kvferry.engine import (
    DEVICE,
    HOST,
    CpuEngine,
    FullAttention,
    HostTier,
    Namespace,
    Plan,
    Pool,
    Rank,
    Receipt,
    Scheduler,
    Worker,
    chain,
    describe,
)

RANKS, BLOCKS, SLOTS, BLOCK_TOKENS = 2, 8, 16, 16


class RankProcess:
    """Stands for one worker process: its share of the KV heads, its own host slots."""

    def __init__(self, rank: int) -> None:
        self.kv = [np.random.default_rng().random((BLOCKS, 2, BLOCK_TOKENS, 1, 64))]
        layout = describe(self.kv, block_axis=0)
        host = HostTier(SLOTS, layout.block_bytes)
        engine = CpuEngine((layout,), host.rows, rank=Rank(rank))
        routes = {(DEVICE, HOST): engine, (HOST, DEVICE): engine}
        self.worker = Worker(routes, rank=Rank(rank))

    def execute(self, message: bytes) -> list[Receipt]:
        plan: Plan = pickle.loads(message)
        self.worker.execute(plan)
        return self.worker.drain()


ranks = [RankProcess(rank) for rank in range(RANKS)]
scheduler = Scheduler(Pool(SLOTS), [FullAttention(BLOCK_TOKENS)], num_ranks=RANKS)
namespace = Namespace(
    model="my-model",
    dtype="float64",
    layout="example",
    geometry="1 layer",
    block_tokens=BLOCK_TOKENS,
)
keys = chain(namespace, range(3 * BLOCK_TOKENS))

# Store: the request's three blocks lie in device blocks 5, 0 and 7.
first = scheduler.open("first", keys)
first.store([[5, 0, 7]], num_tokens=48)
first.end()
plan = pickle.dumps(scheduler.plan())
scheduler.settle(ranks[0].execute(plan))
second = scheduler.open("second", keys)
print("after one rank: ", second.match().state.value)
scheduler.settle(ranks[1].execute(plan))
match = second.match()
print("after both:     ", match.state.value, match.num_tokens, "tokens")

# Load into device blocks 1, 2 and 3 of another request.
before = [rank.kv[0][[5, 0, 7]].copy() for rank in ranks]
second.load([[1, 2, 3]])
plan = pickle.dumps(scheduler.plan())
for rank in ranks:
    settled = scheduler.settle(rank.execute(plan))
print("ready to run:   ", *settled.loaded)
assert settled.loaded == (second,)
for rank, expected in zip(ranks, before, strict=True):
    assert np.array_equal(rank.kv[0][[1, 2, 3]], expected)

for rank in ranks:
    rank.worker.close()
scheduler.close()
