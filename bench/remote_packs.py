"""What objects of several blocks would gain on S3 over an object for each block.

    PYTHONPATH=src:. python bench/remote_packs.py [--server rclone] [--latency 20ms] [--rounds 3]

By the plain client, so it is the most that packs could give: nothing is sealed, found, or copied
out of a pack. Compared in one run, in turn: objects of one block with as many requests under way
as kvferry has for that size, and objects of 4, 8 and 16 blocks with 32 requests (fewer where they
would hold more than 256 MiB). ``find`` is a chain's blocks looked up by HEAD, one for each object.
The latency is put before each answer by a process between client and server, which is there for the
row of 0 ms too.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvferry.quantities import KiB, MiB, parse_seconds

SKIPPED = 77
try:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' real servers
    import obstore
    from tests.fakes import remote, s3_servers

    from kvferry.tiers.remote.s3 import FIND_CALLS, most_calls
except ModuleNotFoundError as error:
    print(f"{error}: pip install -e '.[dev]'", file=sys.stderr)
    sys.exit(SKIPPED)

PACKS = (4, 8, 16)
FEW_CALLS, MOST_BYTES = 32, 256 * MiB
TOTALS = {"rclone": 64 * MiB, "moto": 16 * MiB}  # a round's bytes: moto is slow
NUM_FOUND = 512
Done = Callable[[int], Any]


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


async def at_once(one: Done, count: int, calls: int) -> None:
    """All of them, so many at a time."""
    limit = asyncio.Semaphore(calls)

    async def bounded(at: int) -> None:
        async with limit:
            await one(at)

    await asyncio.gather(*map(bounded, range(count)))


def seconds_of(one: Done, count: int, calls: int) -> float:
    begun = time.perf_counter()
    asyncio.run(at_once(one, count, calls))
    return time.perf_counter() - begun


class Objects:
    """So many blocks of one size, in objects of so many."""

    def __init__(self, store: Any, size: int, in_one: int, total: int, calls: int) -> None:
        self._store, self._in_one, self._calls = store, in_one, calls
        self._content = secrets.token_bytes(in_one * size)
        self._count = max(1, total // size // in_one)
        self._names: list[str] = []

    def rates(self) -> Iterator[tuple[str, float]]:
        """Bytes a second written and read; blocks a second looked up."""
        self._names = [f"packs/{secrets.token_hex(16)}" for _ in range(self._count)]
        num_bytes = self._count * len(self._content)
        for way, one in (("put", self._put), ("get", self._get)):
            yield way, num_bytes / seconds_of(one, self._count, self._calls)
        num_found = NUM_FOUND // self._in_one
        yield "find", NUM_FOUND / seconds_of(self._head, num_found, FIND_CALLS)
        obstore.delete(self._store, self._names)

    async def _put(self, at: int) -> None:
        await obstore.put_async(self._store, self._names[at], self._content, use_multipart=False)

    async def _get(self, at: int) -> None:
        answer = await obstore.get_async(self._store, self._names[at])
        assert len(await answer.bytes_async()) == len(self._content)

    async def _head(self, at: int) -> None:
        await obstore.head_async(self._store, self._names[at % self._count])


def compare(endpoint: str, kind: str, size: int, rounds: int) -> None:
    """Every way in turn; a line for each direction."""
    store, total = remote.bucket_at(endpoint), TOTALS[kind]
    ways = {"one": (1, most_calls(size))}
    ways |= {f"of {n}": (n, min(FEW_CALLS, MOST_BYTES // size // n)) for n in PACKS}
    objects = {name: Objects(store, size, n, total, calls) for name, (n, calls) in ways.items()}
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, each in objects.items():
            for way, rate in each.rates():
                if number:  # the first warms connections
                    rates.setdefault((way, name), []).append(rate)
    for way, unit in (("put", 1e9), ("get", 1e9), ("find", 1e3)):
        middle = {name: statistics.median(rates[way, name]) / unit for name in ways}
        figures = "".join(f"{middle[name]:15.2f}" for name in ways)
        print(
            f"{f'{way}, {size // KiB} KiB':20}{figures}{middle['of 8'] / middle['one']:15.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", choices=s3_servers.SERVERS, default="rclone")
    parser.add_argument("--latency", default="20ms", help="before each answer; none is run too")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 2304], help="KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass-on", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_on:
        serve_latency(args.pass_on, float(args.latency))
    latency = parse_seconds(args.latency, name="latency")
    # rclone would hash a file for its ETag whenever it is asked for: no store at scale does.
    options = ["--etag-hash="] if args.server == "rclone" else []
    server = s3_servers.S3Server(args.server, "/dev/shm", None, *options)
    server.start()
    heads = ["one", *(f"of {n}" for n in PACKS), "of 8/one"]
    try:
        for seconds in (0.0, latency):
            print(f"\n{args.server}, {seconds * 1e3:g} ms before each answer; GB/s, 1000 blocks/s")
            print(f"{'':20}{''.join(f'{head:>15}' for head in heads)}")
            with behind_latency(server.port, seconds) as endpoint:
                for size in args.sizes:
                    compare(endpoint, args.server, size * KiB, args.rounds)
    finally:
        server.close()


if __name__ == "__main__":
    main()
