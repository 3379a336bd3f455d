"""What a shared store costs through kvferry, against the engine's own client in the same run.

    PYTHONPATH=src:. python bench/remote.py [--only s3] [--blocks 96]

Blocks of 1 MiB in batches of 32, both ways, idle and beside a thread that keeps the interpreter
busy, as an engine's own thread does. The stores are real ones on loopback: rclone's S3 server (its
files in memory), and a Mooncake master with a peer that gives memory. Theirs and ours move the same
bytes from and to the same memory, in turn; ours also proves every block. The last lines say what
the busy thread itself could do meanwhile, of what it does alone: with two cores, one pays for the
other. Exits with 77 where nothing can be run.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.quantities import MiB
from kvferry.hostmem.memory import HostMemory
from kvferry.tiers.contract import Batch, BatchId, TierSetup, Way
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.tier import RemoteTier, open_remote
from kvferry.types import TierName

SKIPPED = 77
try:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' real servers
    from tests.fakes import mooncake_store, remote, s3_servers
except ModuleNotFoundError as error:
    print(f"{error}: pip install -e '.[dev]'", file=sys.stderr)
    sys.exit(SKIPPED)

BLOCK, BATCH = MiB, 32
CALLS = 32  # as many requests at once as ours has
DEADLINE = 120.0
Move = Callable[[list[str]], None]


class Memory:
    """Host slots, as an engine has them: half to send, half to get into."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.host = HostMemory(2 * num_blocks * BLOCK, BLOCK)
        while self.host.ready_slots < self.host.num_slots:
            time.sleep(0.01)
        rows = self.host.tier.rows
        self.sent, self.got = rows[:num_blocks], rows[num_blocks:]
        rng = np.random.default_rng()
        self.sent[:] = rng.integers(0, 256, (num_blocks, BLOCK), dtype=np.uint8)
        self.got[:] = 0

    def check(self) -> None:
        assert (self.sent == self.got).all(), "bytes differ"
        self.got[:] = 0


class Ours:
    """Our tier, spoken to as the scheduler does: several batches under way."""

    def __init__(self, tier: RemoteTier, memory: Memory) -> None:
        assert not tier.ailment, tier.ailment
        self._tier = tier
        self._memory = memory
        self._next_id = 0

    def put(self, names: list[str]) -> None:
        self._move(Way.WRITE, names, self._memory.sent)

    def get(self, names: list[str]) -> None:
        self._move(Way.READ, names, self._memory.got)

    def _move(self, way: Way, names: list[str], rows: Any) -> None:
        keys = Keys.from_bytes([bytes.fromhex(name) for name in names])
        addresses = (rows.ctypes.data + np.arange(len(names)) * BLOCK)[:, None]
        sizes = np.array([BLOCK], dtype=np.int64)
        for at in range(0, len(names), BATCH):
            self._next_id += 1
            some = slice(at, at + BATCH)
            end = time.monotonic() + DEADLINE
            self._tier.submit(
                Batch(BatchId(self._next_id), way, keys[some], end, addresses[some], sizes)
            )
        for result in self._tier.drain(DEADLINE):
            assert result.ok.all(), result.reasons


class PlainS3:
    """obstore as one would use it: as many requests at once, bytes into the slots."""

    def __init__(self, endpoint: str, memory: Memory) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            s3_servers.BUCKET,
            endpoint=endpoint,
            access_key_id=s3_servers.ACCESS,
            secret_access_key=s3_servers.SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        self._memory = memory
        # As deep in folders as ours: rclone's objects are files.
        self._folder = f"plain/{ObjectFormat(secrets.token_bytes(32), BLOCK).folder()}"

    def put(self, names: list[str]) -> None:
        import obstore

        async def one(at: int) -> None:
            content = memoryview(self._memory.sent[at])
            await obstore.put_async(
                self._store, f"{self._folder}/{names[at]}", content, use_multipart=False
            )

        asyncio.run(_at_once(one, len(names)))

    def get(self, names: list[str]) -> None:
        import obstore

        async def one(at: int) -> None:
            answer = await obstore.get_async(self._store, f"{self._folder}/{names[at]}")
            content = await answer.bytes_async()
            self._memory.got[at] = np.frombuffer(content, dtype=np.uint8)

        asyncio.run(_at_once(one, len(names)))


async def _at_once(one: Callable[[int], Any], count: int) -> None:
    calls = asyncio.Semaphore(CALLS)

    async def bounded(at: int) -> None:
        async with calls:
            await one(at)

    await asyncio.gather(*map(bounded, range(count)))


class PlainMooncake:
    """Mooncake's client with registered memory, batch by batch."""

    def __init__(self, place: str, memory: Memory) -> None:
        mooncake_store.load_here()
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        host = "127.0.0.1"
        assert self._store.setup(host, "P2PHANDSHAKE", 0, 16 * MiB, "tcp", "", place) == 0
        self._memory = memory
        slots = memory.host.tier
        assert self._store.register_buffer(slots.address, slots.chunks.num_bytes) == 0

    def put(self, names: list[str]) -> None:
        for some, places, sizes in self._batches(names, self._memory.sent):
            assert not any(self._store.batch_put_from(some, places, sizes))

    def get(self, names: list[str]) -> None:
        for some, places, sizes in self._batches(names, self._memory.got):
            assert set(self._store.batch_get_into(some, places, sizes)) == {BLOCK}

    @staticmethod
    def _batches(names: list[str], rows: Any) -> Iterator[tuple[list[str], list[int], list[int]]]:
        for at in range(0, len(names), BATCH):
            some = names[at : at + BATCH]
            places = [rows.ctypes.data + (at + i) * BLOCK for i in range(len(some))]
            yield some, places, [BLOCK] * len(some)

    def close(self) -> None:
        self._store.close()


class Busy:
    """A thread that computes in the interpreter, as an engine's scheduler does, and counts."""

    def __init__(self) -> None:
        self.count = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._compute)

    def _compute(self) -> None:
        while not self._done.is_set():
            sum(range(10_000))
            self.count += 1

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def measure(name: str, plain: Any, ours: Ours, memory: Memory, rounds: int) -> None:
    """Both in turn, rounds times; prints medians: of the rates, and of each round's ratio."""
    print(f"\n{name}: {memory.num_blocks} blocks of 1 MiB in batches of {BATCH}, GB/s")
    print(f"{'':24}{'its own client':>16}{'kvferry':>10}{'ratio':>8}")
    clients = {"plain": plain, "ours": ours}
    tell("idle", _in_turn(clients, memory, rounds, lambda: 0))
    with Busy() as busy:
        time.sleep(0.5)
        alone = busy.count / 0.5
        rates = _in_turn(clients, memory, rounds, lambda: busy.count)
    tell("busy", rates)
    for way in ("put", "get"):
        done = [[each / alone for each in rates[f"{way} beside", who]] for who in clients]
        tell_line(f"{way}, thread's speed", *done)


def _in_turn(
    clients: dict[str, Any], memory: Memory, rounds: int, count: Callable[[], int]
) -> dict[tuple[str, str], list[float]]:
    """GB/s of each way and client, and what ``count`` rose by a second meanwhile."""
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for who, client in clients.items():
            names = [secrets.token_hex(32) for _ in range(memory.num_blocks)]
            for way in ("put", "get"):
                begun, before = time.perf_counter(), count()
                getattr(client, way)(names)
                took = time.perf_counter() - begun
                if number:  # the first warms connections
                    rate = memory.num_blocks * BLOCK / took / 1e9
                    rates.setdefault((way, who), []).append(rate)
                    rates.setdefault((f"{way} beside", who), []).append((count() - before) / took)
            memory.check()
    return rates


def tell(how: str, rates: dict[tuple[str, str], list[float]]) -> None:
    for way in ("put", "get"):
        tell_line(f"{way}, {how}", rates[way, "plain"], rates[way, "ours"])


def tell_line(what: str, plain: Sequence[float], ours: Sequence[float]) -> None:
    """The ratio is that of each round: what else a machine does changes with the minute."""
    ratio = statistics.median(our / their for their, our in zip(plain, ours, strict=True))
    plainly, ourly = statistics.median(plain), statistics.median(ours)
    print(f"{what:24}{plainly:16.2f}{ourly:10.2f}{ratio:8.2f}", flush=True)


def s3(memory: Memory, rounds: int) -> None:
    server = s3_servers.S3Server("rclone", folder="/dev/shm")
    server.start()
    tier = remote.open_s3(server.endpoint, BLOCK)
    try:
        measure("S3", PlainS3(server.endpoint, memory), Ours(tier, memory), memory, rounds)
    finally:
        tier.close()
        server.close()


def mooncake(memory: Memory, rounds: int) -> None:
    master = mooncake_store.Master()
    master.start()
    peer = mooncake_store.Peer(master, 5 * (rounds + 1) * memory.sent.nbytes)  # never full
    plain = PlainMooncake(master.place, memory)
    setup = TierSetup(
        TierName("remote"),
        BLOCK,
        options=f"mooncake://{master.place}",
        shared_namespace=secrets.token_bytes(32),
    )
    with remote.environment(mooncake_store.environment()):
        tier = open_remote(setup)
    try:
        measure("Mooncake", plain, Ours(tier, memory), memory, rounds)
    finally:
        tier.close()
        plain.close()
        peer.close()
        master.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("s3", "mooncake"))
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    memory = Memory(args.blocks)
    has_run = False
    if args.only != "mooncake":
        s3(memory, args.rounds)
        has_run = True
    if args.only != "s3" and mooncake_store.lacking():
        print(f"no Mooncake: {mooncake_store.lacking()}", file=sys.stderr)
    elif args.only != "s3":
        mooncake(memory, args.rounds)
        has_run = True
    if not has_run:
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
