"""What a Mooncake master takes: questions a second, and memory for each object that it knows.

Starts a real master on the loopback with clients beside it, each a process. Names are as long as
kvferry's; objects are small, for the master sees only their names and places. Prints a table.
Status 77 where Mooncake cannot run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kvferry.errors import InputError
from kvferry.tools.demo.mooncake_master import MooncakeMaster, require_mooncake

SKIPPED = 77
BATCH = 512

_CLIENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
place, number, count, seconds, batch = sys.argv[1], *map(int, sys.argv[2:6])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", place) == 0
names = [f"kvferry-1/{number:064x}/r0of1/{0:016x}/{at:064x}" for at in range(count)]
for at in range(0, count, batch):
    some = names[at : at + batch]
    assert store.put_batch(some, [b"x" * 64] * len(some)) == 0
print("ready", flush=True)
sys.stdin.readline()
asked, end = 0, time.perf_counter() + seconds
start = time.perf_counter()
while time.perf_counter() < end:
    at = asked % count
    some = names[at : at + batch]
    assert all(code == 1 for code in store.batch_is_exist(some))
    asked += len(some)
print(asked / (time.perf_counter() - start), flush=True)
sys.stdin.readline()
"""


def memory(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--objects", type=int, default=100_000, help="of each client")
    parser.add_argument("--seconds", type=int, default=5)
    options = parser.parse_args()
    try:
        require_mooncake()
    except InputError as error:
        print(error)
        sys.exit(SKIPPED)
    with MooncakeMaster() as master:
        before = memory(master.pid)
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", _CLIENT, master.place]
                + [str(n) for n in (number, options.objects, options.seconds, BATCH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for number in range(options.clients)
        ]
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == "ready\n"
            grown = memory(master.pid) - before
            for client in clients:
                client.stdin.write("\n")  # type: ignore[union-attr]
                client.stdin.flush()  # type: ignore[union-attr]
            rates = [float(client.stdout.readline()) for client in clients]  # type: ignore[union-attr]
        finally:
            for client in clients:
                client.kill()
                client.wait()
    print("| clients | objects | names looked up a second | master's bytes an object |")
    print("|---|---|---|---|")
    num_objects = options.clients * options.objects
    print(
        f"| {options.clients} | {num_objects:,} | {sum(rates):,.0f} | {grown / num_objects:,.0f} |"
    )


if __name__ == "__main__":
    main()
