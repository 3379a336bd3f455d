"""How long a store's index takes to come back after a crash, and what it costs.

One row for each number of blocks: the bytes of the index, the time and the memory that recovery
takes in a process of its own, and what the process keeps afterwards. Beside it, what reading the
same bytes takes: the limit.

Half the blocks are written a second time, in random order, so that both copies of every page are in
use. Recovered blocks are counted, and handed over as a
drive process does; ``--check`` compares every one of them.

    python bench/disk_recovery.py --blocks 10000000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KeyArray, Keys
from kvferry.tiers.disk.files import allocate
from kvferry.tiers.disk.index import FILE_NAME, DiskIndex, Shape
from kvferry.tiers.disk.superblock import StoreIdentity, Superblock

STORE_ID = b"recovery-bench-1"
IDENTITY = StoreIdentity(bytes(32), 1 << 20)
PROOF_BYTES = 16
BATCH = 100_000
MIB = 1 << 20

Integers = npt.NDArray[np.int64]


def rows(numbers: Integers, words: int, salt: int) -> KeyArray:
    """Random words, the same for the same number: so that nothing need be remembered."""
    each = np.arange(words, dtype=np.uint64) + np.uint64(salt)
    mixed: KeyArray = numbers.astype(np.uint64)[:, None] * np.uint64(words) + each
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def write_store(folder: Path, num_blocks: int) -> float:
    """Fill every place, then half of them anew in random order; returns the seconds."""
    allocate(folder / FILE_NAME, Shape(PROOF_BYTES).file_bytes(num_blocks))
    allocate(folder / "state", 4096)
    rng = np.random.default_rng(1)
    again = rng.permutation(num_blocks)[: num_blocks // 2]
    began = time.perf_counter()
    index = DiskIndex.open(folder, Superblock(IDENTITY, num_blocks, STORE_ID))
    for generation, order in enumerate((np.arange(num_blocks, dtype=np.int64), again)):
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            numbers = places + generation * num_blocks
            proofs = rows(numbers, 2, 7).view(np.uint8).reshape(-1, PROOF_BYTES)
            index.record_written(places, Keys(rows(numbers, 4, 3)), proofs)
            index.commit()
    return time.perf_counter() - began


def recover(folder: Path, num_blocks: int, check: bool) -> dict[str, float]:
    """Open what is there, as the next process would; nothing was closed."""
    before = _resident()
    began = time.perf_counter()
    index = DiskIndex.open(folder, Superblock(IDENTITY, num_blocks, STORE_ID))
    opened = time.perf_counter() - began
    keys, places = index.take_recovered()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    handed, right = len(places), 0
    if check:
        first = rows(places, 4, 3)
        second = rows(places + num_blocks, 4, 3)
        is_second = (keys.array == second).all(axis=1)
        is_first = (keys.array == first).all(axis=1)
        proof = rows(places + is_second * num_blocks, 2, 7).view(np.uint8)
        same = (index.proofs[places] == proof.reshape(-1, PROOF_BYTES)).all(axis=1)
        right = int(np.count_nonzero((is_first | is_second) & same))
    del keys, places
    if handed != num_blocks or (check and right != num_blocks):
        raise SystemExit(f"{handed} blocks came back, {right} as written, of {num_blocks}")
    return {
        "open_seconds": opened,
        "seconds": seconds,
        "peak_bytes": peak - before,
        "kept_bytes": _resident() - before,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def read_all(folder: Path) -> float:
    """Seconds to read the file, as recovery finds it: in the page cache or not."""
    began = time.perf_counter()
    with (folder / FILE_NAME).open("rb", buffering=0) as file:
        while file.read(4 * MIB):
            pass
    return time.perf_counter() - began


def drop_cache(folder: Path) -> None:
    fd = os.open(folder / FILE_NAME, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(num_blocks: int, where: Path, check: bool) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=where))
    try:
        told = [sys.executable, __file__, "--folder", str(folder), "--blocks", str(num_blocks)]
        wrote = json.loads(subprocess.check_output([*told, "--part", "write"]))
        drop_cache(folder)
        reading = read_all(folder)
        drop_cache(folder)
        checked = ["--check"] if check else []
        found = json.loads(subprocess.check_output([*told, *checked, "--part", "recover"]))
        return {
            "num_blocks": num_blocks,
            "file_bytes": Shape(PROOF_BYTES).file_bytes(num_blocks),
            "write_seconds": wrote,
            "read_seconds": reading,
            **found,
        }
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000])
    parser.add_argument("--where", type=Path, default=None, help="a directory on the drive to use")
    parser.add_argument("--check", action="store_true", help="compare every recovered block")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--part", choices=("write", "recover"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "write":
        print(json.dumps(write_store(args.folder, args.blocks[0])))
        return
    if args.part == "recover":
        print(json.dumps(recover(args.folder, args.blocks[0], args.check)))
        return
    where = args.where or Path(tempfile.gettempdir())
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print("    blocks  MiB of index  read all  recover  of reading  peak MiB  kept MiB")
    figures = []
    for num_blocks in args.blocks:
        found = measure(num_blocks, where, args.check)
        figures.append(found)
        print(
            f"{num_blocks:10,d}  {found['file_bytes'] / MIB:12.0f}"
            f"  {found['read_seconds']:6.2f} s"
            f"  {found['seconds']:5.2f} s  {found['seconds'] / found['read_seconds']:9.1f}x"
            f"  {found['peak_bytes'] / MIB:8.0f}  {found['kept_bytes'] / MIB:8.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
