"""What several blocks of a chain in one object gain on S3 over an object for each block.

    PYTHONPATH=src:. python bench/remote_packs.py [--server rclone] [--latency 20ms] [--rounds 3]

Through the tier, as an engine uses it: every block sealed and proven, found before it is read, and
read by another process than the one that wrote it. Compared in one run, in turn: objects of one
block (``pack=1``), and objects of as many as each name says. A chain is looked up twice: where it
is, and where nothing is. The latency is put before each answer by a process between client and
server, which is there for the rows of 0 ms too.

First, without bytes, how well the real scheduler's orders can be packed: conversations that come
back in random order and grow by a few blocks each time, written as they are stored or when the host
evicts them.
"""

from __future__ import annotations

import argparse
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.quantities import KiB, MiB, parse_seconds
from kvferry.scheduler.tier import PackedTier, WriteMode
from kvferry.tiers.contract import Batch, BatchId, Way
from kvferry.tiers.remote.objects import pack_objects
from kvferry.tiers.remote.tier import RemoteTier
from kvferry.types import TierName

SKIPPED = 77
try:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' real servers
    from tests.fakes import remote, s3_servers
    from tests.fakes.desk import FULL, Desk, story
except ModuleNotFoundError as error:
    print(f"{error}: pip install -e '.[dev]'", file=sys.stderr)
    sys.exit(SKIPPED)

ONE = 1
PACKS = (4, 8, 16)
TOTALS = {"rclone": 64 * MiB, "moto": 16 * MiB}  # a round's bytes: moto is slow
MOST_BLOCKS = 512
PIECE = 16 * MiB  # a batch: as the scheduler orders them
DEADLINE = 120.0


def serve_latency(to_port: int, seconds: float) -> None:
    """Pass everything on, each answer's beginning so much later. Prints its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    while True:
        near = listener.accept()[0]
        far = socket.create_connection(("127.0.0.1", to_port))
        asked = threading.Event()
        for source, sink, answers in ((near, far, False), (far, near, True)):
            for sock in (source, sink):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            args = (source, sink, asked, answers, seconds)
            threading.Thread(target=_pump, args=args, daemon=True).start()


def _pump(
    source: socket.socket, sink: socket.socket, asked: threading.Event, answers: bool, wait: float
) -> None:
    room = memoryview(bytearray(256 * KiB))
    with suppress(OSError):
        while count := source.recv_into(room):
            if not answers:
                asked.set()
            elif asked.is_set():
                asked.clear()
                time.sleep(wait)
            sink.sendall(room[:count])
    for sock in (source, sink):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def behind_latency(port: int, seconds: float) -> Iterator[str]:
    """The endpoint of a server that is so far away."""
    command = [sys.executable, __file__, "--pass-on", str(port), "--latency", str(seconds)]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert proxy.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(proxy.stdout.readline())}"
    finally:
        proxy.kill()
        proxy.wait()
        proxy.stdout.close()


class Chain:
    """Blocks of one size, sent by one tier and fetched by another, in objects of so many."""

    def __init__(self, endpoint: str, size: int, total: int, in_one: int) -> None:
        namespace = secrets.token_bytes(32)
        self._tiers = [
            remote.open_s3(endpoint, size, namespace=namespace, pack=in_one) for _ in range(2)
        ]
        rng = np.random.default_rng()
        count = min(total // size, MOST_BLOCKS)
        self._sent = rng.integers(0, 256, (count, size), dtype=np.uint8)
        self._got = np.zeros_like(self._sent)
        self._sizes = np.array([size], dtype=np.int64)
        self._next_id = 0

    def rates(self) -> Iterator[tuple[str, float]]:
        """Bytes a second written and read; blocks a second looked up."""
        keys, others = (self._keys(), self._keys())
        writer, reader = self._tiers
        count = len(self._sent)
        self._got[:] = 0
        yield "put", self._sent.nbytes / self._move(writer, Way.WRITE, keys, self._sent)
        yield "find", count / self._find(reader, keys, there=True)
        yield "get", self._sent.nbytes / self._move(reader, Way.READ, keys, self._got)
        yield "find, not there", count / self._find(reader, others, there=False)
        assert (self._sent == self._got).all(), "bytes differ"

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _keys(self) -> Keys:
        return Keys.from_bytes([secrets.token_bytes(32) for _ in self._sent])

    def _move(self, tier: RemoteTier, way: Way, keys: Keys, rows: np.ndarray) -> float:
        begun = time.perf_counter()
        step = PIECE // rows.shape[1]
        starts = (rows.ctypes.data + np.arange(len(rows)) * rows.shape[1])[:, None]
        for at in range(0, len(rows), step):
            some = slice(at, at + step)
            self._submit(tier, way, keys[some], starts[some], self._sizes)
        return self._took(tier, begun)

    def _find(self, tier: RemoteTier, keys: Keys, *, there: bool) -> float:
        begun = time.perf_counter()
        nowhere = np.empty((0, 0), dtype=np.int64)
        self._submit(tier, Way.FIND, keys, nowhere, self._sizes[:0])
        return self._took(tier, begun, there)

    def _submit(
        self, tier: RemoteTier, way: Way, keys: Keys, starts: np.ndarray, sizes: np.ndarray
    ) -> None:
        self._next_id += 1
        runs = np.zeros(len(keys), dtype=np.int64)
        end = time.monotonic() + DEADLINE
        tier.submit(Batch(BatchId(self._next_id), way, keys, end, starts, sizes, runs=runs))

    @staticmethod
    def _took(tier: RemoteTier, begun: float, ok: bool = True) -> float:
        for result in tier.drain(DEADLINE):
            assert (result.ok == ok).all(), result.reasons
        return time.perf_counter() - begun


def tell_packed(write: WriteMode, turn_blocks: tuple[int, int]) -> None:
    """How many objects of up to eight blocks a fleet's server would write for so many blocks."""
    tier = TierName("store")
    below = PackedTier(tier, write, most_in_one=16)
    desk = Desk(tiers=[below], slots=2048, policy="lru")
    rng = random.Random(7)
    lengths = dict.fromkeys(range(200), 0)
    num_blocks = num_objects = num_alone = 0
    for turn in range(1500):
        number = rng.randrange(len(lengths))
        lengths[number] += rng.randint(*turn_blocks)
        name, chain = str(turn), story(number, min(lengths[number], 999))
        desk.store(name, chain, len(chain) * FULL.block_tokens)
        desk.scheduler.finish(name)
        desk.now += 1.0
        for _ in range(2):  # what was stored is sent down with the next
            for move in desk.plan():
                if move.dst == tier:
                    objects = pack_objects([""] * len(move), move.runs, 8)
                    num_blocks += len(move)
                    num_objects += len(objects)
                    num_alone += sum(each.num_blocks == 1 for each in objects)
            desk.land()
    print(
        f"{write.value + f', turns of {turn_blocks[0]} to {turn_blocks[1]} blocks':34}"
        f"{num_blocks:8} blocks in {num_objects:6} objects, {num_alone / num_blocks:6.1%} alone",
        flush=True,
    )


def compare(endpoint: str, kind: str, size: int, rounds: int) -> None:
    """Every way in turn; a line for each: blocks one by one, and times as fast in packs."""
    chains = {n: Chain(endpoint, size, TOTALS[kind], n) for n in (ONE, *PACKS)}
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for in_one, chain in chains.items():
            for way, rate in chain.rates():
                if number:  # the first warms connections
                    rates.setdefault((way, in_one), []).append(rate)
    for chain in chains.values():
        chain.close()
    for way in dict.fromkeys(way for way, _ in rates):
        unit = 1e9 if way in ("put", "get") else 1e3
        ones = rates[way, ONE]
        line = f"{f'{way}, {size // KiB} KiB':28}{statistics.median(ones) / unit:12.2f}"
        for in_one in PACKS:
            ratios = [pack / one for pack, one in zip(rates[way, in_one], ones, strict=True)]
            line += f"{statistics.median(ratios):10.2f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", choices=s3_servers.SERVERS, default="rclone")
    parser.add_argument("--latency", default="20ms", help="before each answer; none is run too")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512, 1024], help="KiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pass-on", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_on:
        serve_latency(args.pass_on, float(args.latency))
    latency = parse_seconds(args.latency, name="latency")
    for write in (WriteMode.THROUGH, WriteMode.SPILL):
        for turn_blocks in ((1, 6), (3, 60)):
            tell_packed(write, turn_blocks)
    # rclone would hash a file for its ETag whenever it is asked for, and list a folder for every
    # object in it: no store at scale does.
    options = ["--etag-hash=", "--dir-cache-time=1h"] if args.server == "rclone" else []
    server = s3_servers.S3Server(args.server, "/dev/shm", None, *options)
    server.start()
    try:
        for seconds in (0.0, latency):
            print(f"\n{args.server}, {seconds * 1e3:g} ms before each answer")
            heads = "".join(f"{f'of {n}':>10}" for n in PACKS)
            print(f"{'GB/s, 1000 blocks/s':28}{'one by one':>12}{heads}   times as fast")
            with behind_latency(server.port, seconds) as endpoint:
                for size in args.sizes:
                    compare(endpoint, args.server, size * KiB, args.rounds)
    finally:
        server.close()


if __name__ == "__main__":
    main()
