"""The plug-ins for SGLang and for vLLM's OffloadingConnector against the tiers below them.

    PYTHONPATH=src:. .venv-sglang/bin/python bench/plug_ins.py --folder /mnt/nvme/bench
    PYTHONPATH=src:. .venv-vllm/bin/python bench/plug_ins.py --folder /mnt/nvme/bench

Each moves the same blocks from and to the same memory, in turn, round after round: the tier itself
as ``bench/disk.py`` and ``bench/remote.py`` drive it, then each plug-in that can be imported, by
its engine's own calls (SGLang: 128 pages at a time; vLLM: jobs of 32 MiB). The disk is under
``--folder``, the shared store is rclone's S3 server on loopback. The last figure is the plug-in's
share of the tier's rate, the median of the rounds. Exits with 77 where no plug-in can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from disks.ways import BATCH_BYTES, IN_FLIGHT, Blocks, DiskWay, Tier
from kvferry.core.keys import Keys
from kvferry.core.quantities import MiB, parse_size
from kvferry.tiers.contract import Batch, BatchId, TierSetup, Way
from kvferry.types import TierName

SKIPPED = 77
PAGES = 128
DEADLINE = "60s"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if importlib.util.find_spec("sglang"):
    import tests.sglang.cpu  # noqa: F401  # stand-ins for what SGLang imports and does not use


class Remote:
    """The tier of a shared store, through its contract."""

    def __init__(self, blocks: Blocks, address: str) -> None:
        from kvferry.tiers.remote.tier import open_remote

        setup = TierSetup(TierName("remote"), blocks.block_bytes, options=address)
        namespace = secrets.token_bytes(32)
        setup = TierSetup(**{**vars(setup), "shared_namespace": namespace})
        self._blocks = blocks
        self._keys = Keys.from_bytes(secrets.token_bytes(32) for _ in range(blocks.num_blocks))
        self._tier = open_remote(setup)
        while self._tier.ailment:
            time.sleep(0.01)
            self._tier.poll()
        self._next = 0

    def write(self) -> None:
        self._all(Way.WRITE)

    def read(self) -> None:
        self._all(Way.READ)

    def _all(self, way: Way) -> None:
        blocks, tier, under_way = self._blocks, self._tier, 0
        for first, count in blocks.batches():
            rows = np.arange(first, first + count)
            addresses = blocks.memory.ctypes.data + rows[:, None] * blocks.block_bytes
            self._next += 1
            tier.submit(
                Batch(
                    BatchId(self._next),
                    way,
                    self._keys[first : first + count],
                    time.monotonic() + 60,
                    addresses,
                    np.array([blocks.block_bytes]),
                )
            )
            under_way += 1
            while under_way * BATCH_BYTES >= IN_FLIGHT:
                under_way -= self._ended(tier.poll())
                time.sleep(0.0005)
        self._ended(tier.drain())

    def _ended(self, results: list[Any]) -> int:
        for result in results:
            assert result.ok.all(), result.reasons
        return len(results)

    def close(self) -> None:
        self._tier.close()


class Sglang:
    """SGLang's calls: 128 pages at a time, each page two pieces of the host pool."""

    def __init__(self, blocks: Blocks, settings: dict[str, str]) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        from kvferry.connectors.sglang.storage import KvferryStorage

        piece = blocks.block_bytes // 2
        start = blocks.memory.ctypes.data

        def pieces(indices: Any) -> tuple[list[int], list[int]]:
            rows = indices.tolist()
            pointers = [start + row * blocks.block_bytes + at for row in rows for at in (0, piece)]
            return pointers, [piece] * len(pointers) if len(rows) > 1 else [piece] * 2

        pool = SimpleNamespace(
            page_size=1,
            layout="page_first",
            dtype=torch.bfloat16,
            kv_buffer=torch.from_numpy(blocks.memory),
            get_page_buffer_meta=pieces,
        )
        extra = {"interface_v1": 1, "revision": secrets.token_hex(8), **settings}
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)
        self._storage = KvferryStorage(config, {})
        self._storage.register_mem_pool_host(pool)
        self._storage.on_host_pools_registered()
        assert not self._storage.idle_reason, self._storage.idle_reason
        self._names = [secrets.token_hex(32) for _ in range(blocks.num_blocks)]
        self._indices = torch.arange(blocks.num_blocks)

    def write(self) -> None:
        self._names = [secrets.token_hex(32) for _ in self._names]
        self._all(self._storage.batch_set_v1)

    def read(self) -> None:
        self._all(self._storage.batch_get_v1)

    def _all(self, call: Callable[..., list[bool]]) -> None:
        for at in range(0, len(self._names), PAGES):
            names, indices = self._names[at : at + PAGES], self._indices[at : at + PAGES]
            assert all(call(names, indices))

    def close(self) -> None:
        self._storage.close()


class Vllm:
    """vLLM's calls: jobs of 32 MiB, as many under way as the tier itself is given."""

    def __init__(self, blocks: Blocks, settings: dict[str, str]) -> None:
        from tests.connector.test_vllm_tiering import offloading_config
        from vllm.v1.kv_offload.base import make_offload_key

        from kvferry.connectors.vllm.tiering import KvferryTier

        rows = blocks.memory.reshape(blocks.num_blocks, -1)
        spec: Any = SimpleNamespace(config=offloading_config(), replicated_layout=False)
        fresh = secrets.token_hex(8)  # a folder of its own: rclone lists the whole one it writes to
        settings = {"revision": fresh, **settings}
        self._tier = KvferryTier(spec, rows.data, "KvferryTier", **settings)
        self._blocks = blocks
        self._make = make_offload_key
        self._names: list[Any] = []
        self._next = 0

    def write(self) -> None:
        self._names = [
            self._make(secrets.token_bytes(32), 0) for _ in range(self._blocks.num_blocks)
        ]
        self._all(self._tier.submit_store, is_load=False)

    def read(self) -> None:
        self._all(self._tier.submit_load, is_load=True)

    def _all(self, submit: Callable[[Any], None], *, is_load: bool) -> None:
        under_way = 0
        for first, count in self._blocks.batches():
            self._next += 1
            submit(
                SimpleNamespace(
                    job_id=self._next,
                    keys=self._names[first : first + count],
                    chunk_ids=np.arange(first, first + count),
                    is_promotion=is_load,
                )
            )
            under_way += 1
            while under_way * BATCH_BYTES >= IN_FLIGHT:
                under_way -= self._ended()
        while under_way:
            under_way -= self._ended()

    def _ended(self) -> int:
        results = list(self._tier.get_finished_jobs())
        assert all(result.success for result in results)
        time.sleep(0.0005)
        return len(results)

    def close(self) -> None:
        self._tier.shutdown()


def rate(call: Callable[[], None], num_bytes: int) -> float:
    start = time.perf_counter()
    call()
    return num_bytes / (time.perf_counter() - start) / 1e9


def compare(what: str, blocks: Blocks, ways: dict[str, Callable[[], DiskWay]], rounds: int) -> None:
    """Print the rates of each way, and each plug-in's share of the tier's own, which is first."""
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for name in list(ways)[
            :: -1 if number % 2 else 1
        ]:  # what comes second finds a fuller drive
            os.sync()
            way = ways[name]()
            blocks.refill()
            rates.setdefault((name, "write"), []).append(rate(way.write, blocks.num_bytes))
            blocks.poison()
            rates.setdefault((name, "read"), []).append(rate(way.read, blocks.num_bytes))
            blocks.check()
            way.close()
    own = next(iter(ways))
    for (name, verb), found in rates.items():
        shares = [mine / its for mine, its in zip(found, rates[own, verb], strict=True)]
        print(
            f"{what:<7}{name:<10}{verb:<7}{statistics.median(found):6.2f} GB/s"
            f"   {statistics.median(shares):5.2f} of the tier's own"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bytes", default="512MiB")
    parser.add_argument("--block", default="1MiB")
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    plug_ins: dict[str, type[Sglang] | type[Vllm]] = {}
    if importlib.util.find_spec("sglang"):
        plug_ins["sglang"] = Sglang
    if importlib.util.find_spec("vllm"):
        plug_ins["vllm"] = Vllm
    if not plug_ins:
        print("neither SGLang nor vLLM can be imported: not run")
        return SKIPPED
    blocks = Blocks(parse_size(told.bytes), parse_size(told.block))
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=told.folder))
    deadlines = {"store_deadline": DEADLINE, "promote_deadline": DEADLINE}
    try:
        disk = {"disk": str(folder / "disk"), "disk_keep_free": "0", **deadlines}
        # From the second round on both rewrite places: new ones are slower on most file systems.
        disk["revision"] = "one store for all rounds"
        disk["disk_size"] = str(blocks.num_bytes + 128 * MiB)
        ways: dict[str, Callable[[], DiskWay]] = {
            "the tier": lambda: Tier(folder / "own", blocks, {})
        }
        ways |= {name: partial(make, blocks, disk) for name, make in plug_ins.items()}
        compare("disk", blocks, ways, told.rounds)

        from tests.fakes import remote, s3_servers

        os.environ.update(remote.CREDENTIALS)
        endpoint = s3_servers.server("rclone").endpoint
        address = f"s3://{s3_servers.BUCKET}/bench?endpoint={endpoint}"
        store = {"remote": address, **deadlines}
        ways = {"the tier": lambda: Remote(blocks, address)}
        ways |= {name: partial(make, blocks, store) for name, make in plug_ins.items()}
        compare("remote", blocks, ways, told.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
