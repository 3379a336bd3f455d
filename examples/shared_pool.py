"""One pool in host memory, shared by processes: stored once, loaded by each. No GPU needed.

Two ranks of a model whose KV is the same on both (tensor parallel with one KV head, MLA) are
processes of their own. Both map one memory; of every store each copies a part, of every load each
copies all. This process is the scheduler: it knows keys and slots, and never touches a byte.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from kvferry.engine import (
    DEVICE,
    HOST,
    CpuEngine,
    FullAttention,
    HostMemory,
    Namespace,
    Plan,
    Pool,
    Rank,
    Receipt,
    Scheduler,
    SharedHandle,
    SharedMemory,
    SharedMover,
    Worker,
    chain,
    describe,
    slot_layout,
)

RANKS, LAYERS, BLOCKS, BLOCK_TOKENS = 2, 4, 32, 16
POOL_BYTES = 4 << 20


def rank_process(rank: int, link: Connection) -> None:
    """A worker: its copy of the KV, the memory that all share, and nothing of requests or keys."""
    rng = np.random.default_rng(seed=0)  # stands for the model: the same KV on every rank
    kv = [rng.random((BLOCKS, 2, BLOCK_TOKENS, 1, 64), np.float32) for _ in range(LAYERS)]
    computed = [layer.copy() for layer in kv]
    layout = describe(kv, block_axis=0)

    handle: SharedHandle | None = link.recv()  # the first rank makes the memory, others open it
    slots = slot_layout([layout])
    if handle is None:
        memory = SharedMemory.create(POOL_BYTES, slots)
    else:
        memory = SharedMemory.open(handle, slots)
    link.send(memory.handle)
    host = HostMemory(POOL_BYTES, layout.block_bytes, shared=memory)
    host.wait()
    link.send((host.num_slots, host.ready_slots))

    engine = CpuEngine((layout,), host.tier.rows, rank=Rank(rank))
    mover = SharedMover(engine, rank=Rank(rank), num_ranks=RANKS)
    worker = Worker({(DEVICE, HOST): mover, (HOST, DEVICE): mover}, rank=Rank(rank))
    while True:
        message = link.recv()
        if message is None:
            break
        if isinstance(message, Plan):
            worker.execute(message)
            link.send(worker.drain())
        elif message == "forget":  # the engine needed the room on its device
            for layer in kv:
                layer[:] = 0
        else:  # which of my blocks are now what those blocks were?
            here, before = message
            same = zip(kv, computed, strict=True)
            link.send(all(np.array_equal(now[here], old[before]) for now, old in same))
    worker.close()
    host.close()


def execute(plan: Plan, links: list[Connection]) -> list[Receipt]:
    """Every rank gets the whole plan; all of them answer."""
    for link in links:
        link.send(plan)
    return [receipt for link in links for receipt in link.recv()]


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    links = [ours for ours, _ in pipes]
    ranks = [
        spawn.Process(target=rank_process, args=(rank, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    handle = None
    for link in links:
        link.send(handle)
        handle = link.recv()
    sizes = [link.recv() for link in links]

    scheduler = Scheduler(
        Pool(sizes[0][0], num_ready=0), [FullAttention(BLOCK_TOKENS)], num_ranks=2
    )
    for number, (_, ready) in enumerate(sizes):
        scheduler.note_ready(Rank(number), ready)  # a slot serves once every rank has it
    namespace = Namespace(
        model="my-model",
        dtype="float32",
        layout="example",
        geometry={"layers": LAYERS, "kv_heads": 1, "head_size": 64},
        block_tokens=BLOCK_TOKENS,
    )
    keys = chain(namespace, range(6 * BLOCK_TOKENS))

    computed, loaded = [3, 1, 4, 15, 9, 2], [20, 21, 22, 23, 24, 25]
    first = scheduler.open("first", keys)
    first.store([computed], num_tokens=96)
    receipts = execute(scheduler.plan(), links)
    scheduler.settle(receipts)
    first.end()
    for receipt in receipts:
        print(f"rank {receipt.rank} stored {receipt.num_bytes} bytes, {receipt.outcome.value}")

    for link in links:
        link.send("forget")
    second = scheduler.open("second", keys)
    match = second.match()
    second.load([loaded])
    settled = scheduler.settle(execute(scheduler.plan(), links))
    for link in links:
        link.send((loaded, computed))
    same = [link.recv() for link in links]
    print(f"{match.num_tokens} tokens came back to both ranks, bytes equal: {same}")
    assert settled.loaded == (second,)
    assert same == [True, True]

    scheduler.close()
    for link, rank in zip(links, ranks, strict=True):
        link.send(None)
        rank.join()


if __name__ == "__main__":
    main()
