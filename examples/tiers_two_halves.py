"""The two halves with a tier below host memory: one scheduler, two ranks, and a store of your own.

The store finds blocks by their keys, so the scheduler has to ask it: a match answers WAIT until
every rank has said what it has and has brought it up. Plans, receipts and the tier's health
are all that travels.
"""

import pickle
import time

import numpy as np

from kvferry.engine import (
    DEVICE,
    HOST,
    CpuEngine,
    FullAttention,
    HostTier,
    MatchState,
    MemoryTier,
    Namespace,
    Pool,
    Rank,
    Scheduler,
    TierMover,
    TierName,
    Worker,
    WriteMode,
    chain,
    describe,
    lower_tier,
)

RANKS, BLOCKS, SLOTS, BLOCK_TOKENS = 2, 16, 8, 16
STORE = TierName("store")


class RankProcess:
    """Stands for one worker process: its share of the KV, its host slots, its end of the store."""

    def __init__(self, rank: int) -> None:
        self.kv = [np.random.default_rng().random((BLOCKS, 2, BLOCK_TOKENS, 1, 64))]
        layout = describe(self.kv, block_axis=0)
        host = HostTier(SLOTS, layout.block_bytes)
        engine = CpuEngine((layout,), host.rows, rank=Rank(rank))
        tier = MemoryTier(None, layout.block_bytes, name=STORE)
        self.worker = Worker(
            {(DEVICE, HOST): engine, (HOST, DEVICE): engine},
            tiers={STORE: TierMover(host, tier, rank=Rank(rank))},
            rank=Rank(rank),
        )

    def step(self, message: bytes) -> bytes:
        """Start a step's plan; what ended by now, and how the tier is, goes back."""
        self.worker.execute(pickle.loads(message))
        return pickle.dumps((self.worker.poll(), self.worker.health()))


ranks = [RankProcess(rank) for rank in range(RANKS)]
scheduler = Scheduler(
    Pool(SLOTS),
    [FullAttention(BLOCK_TOKENS)],
    num_ranks=RANKS,
    tiers=[lower_tier(STORE, None, WriteMode.THROUGH)],  # None: it has no places of ours
)


def step() -> None:
    plan = pickle.dumps(scheduler.plan())
    for rank in ranks:
        receipts, health = pickle.loads(rank.step(plan))
        for change in health:
            scheduler.note_health(change)
        scheduler.settle(receipts)


def finish() -> None:
    while scheduler.num_queued or scheduler.num_in_flight:
        step()
        time.sleep(0.001)


namespace = Namespace(
    model="my-model",
    dtype="float64",
    layout="example",
    geometry="1 layer",
    block_tokens=BLOCK_TOKENS,
)
chats = [chain(namespace, range(1000 * n, 1000 * n + 2 * BLOCK_TOKENS)) for n in range(6)]

# Six conversations of two blocks each; host memory holds four of them.
for number, keys in enumerate(chats):
    request = scheduler.open(f"writer-{number}", keys)
    while request.match().state is MatchState.WAIT:  # the store is asked first
        step()
    request.store([[2 * number, 2 * number + 1]], num_tokens=2 * BLOCK_TOKENS)
    request.end()
    finish()
before = [rank.kv[0][[0, 1]].copy() for rank in ranks]

reader = scheduler.open("reader", chats[0])
match = reader.match()
print("at first:", match.state.value)
while match.state is MatchState.WAIT:
    step()
    match = reader.match()
print("later:   ", match.state.value, match.num_tokens, "tokens")
reader.load([[14, 15]])
finish()
for rank, expected in zip(ranks, before, strict=True):
    assert np.array_equal(rank.kv[0][[14, 15]], expected)
reader.end()
print("the store was asked for", scheduler.stats().asked[STORE][0], "blocks")

for rank in ranks:
    rank.worker.close()
scheduler.close()
