"""The secondary tier for vLLM's OffloadingConnector, under vLLM's own tiering manager."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.base")

from tests.fakes import s3_servers
from tests.fakes.remote import CREDENTIALS
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvferry.errors import ConfigError

if len(OffloadingGroupConfig.__dataclass_fields__) < 3:
    pytest.skip("this vLLM's secondary tiers are of another form", allow_module_level=True)

CHUNK, CHUNKS = 8192, 6
"""Bytes of a chunk, and chunks of the primary tier: far fewer than the disk has."""
LONG = 30.0


def offloading_config(**changes) -> OffloadingConfig:
    parallel: dict = {"rank": 0, "world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1}
    parallel |= {"dcp_size": 1, "data_parallel_index": 0, "data_parallel_size": 1}
    parallel |= {"data_parallel_rank_local": None, "is_parallelism_agnostic": False}
    parallel |= changes.pop("parallel", {})
    model = OffloadingModelConfig(changes.pop("model", "a/model"), changes.pop("dtype", "bfloat16"))
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK // 2,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=secrets.token_hex(4),
        model=model,
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(**parallel),
        **changes,
    )


class Server:
    """vLLM's two-tier manager with a region of shared memory, as its scheduler process has it."""

    def __init__(self, tier: dict, **changes) -> None:
        config = offloading_config(**changes)
        self.region = SharedOffloadRegion(config.engine_id, CHUNKS, None, CHUNK, CHUNK // 2)
        self.primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region)
        view = self.primary.get_kv_memoryview()
        spec = SimpleNamespace(config=config, replicated_layout=False)
        tier = {"type": "KvferryTier", "module_path": "kvferry.connectors.vllm.tiering"} | tier
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(tier, view, spec)
        except BaseException:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])

    @property
    def rows(self) -> np.ndarray:
        """The primary tier's chunks. vLLM closes its view: no array of it may be kept."""
        return np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        end = time.monotonic() + LONG
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "work stays pending"
            self.step()
            time.sleep(0.001)

    def store(self, blocks: dict[int, bytes]) -> None:
        """A request stores these chunks from the GPU."""
        request = ReqContext(f"store-{secrets.token_hex(4)}")
        self.manager.on_new_request(request)
        for number, content in blocks.items():
            out = self.manager.prepare_store([key(number)], request)
            if out is None:
                continue  # the primary tier is full of chunks in use
            if out.keys_to_store:
                self.rows[out.store_spec.chunk_ids[0]] = np.frombuffer(content, np.uint8)
                self.manager.complete_store(out.keys_to_store, request)
        self.manager.on_request_finished(request)

    def load(self, number: int) -> bytes | None:
        """What a request gets for this chunk; None for a miss."""
        request = ReqContext(f"load-{secrets.token_hex(4)}")
        self.manager.on_new_request(request)
        end = time.monotonic() + LONG
        try:
            while True:
                found = self.manager.lookup(key(number), request)
                if found is LookupResult.HIT:
                    (chunk,) = self.manager.prepare_load([key(number)], request).chunk_ids
                    content = self.rows[chunk].tobytes()
                    self.manager.complete_load([key(number)], request)
                    return content
                if found is LookupResult.MISS:
                    return None
                assert time.monotonic() < end, found
                self.step()
                time.sleep(0.001)
        finally:
            self.manager.on_request_finished(request)

    def close(self) -> None:
        self.manager.shutdown()


def key(number: int) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def fresh(count: int, first: int = 0) -> dict[int, bytes]:
    return {first + number: secrets.token_bytes(CHUNK) for number in range(count)}


def disk_at(folder: Path, size: str = "16MiB") -> dict[str, str]:
    """The settings of a disk; a busy machine may take long to open it."""
    return {
        "disk": str(folder),
        "disk_size": size,
        "disk_keep_free": "0",
        "disk_start_deadline": "60s",
    }


@pytest.fixture
def serve(tmp_path):
    """Starts servers on one disk (or with the given tier), one after the other, and ends them."""
    servers: list[Server] = []

    def start(tier: dict | None = None, **changes) -> Server:
        while servers:
            servers.pop().close()
        disk = {**disk_at(tmp_path / "disk"), "revision": "1"}
        servers.append(Server(disk if tier is None else tier, **changes))
        return servers[0]

    yield start
    for server in servers:
        server.close()


def test_chunks_come_back_from_disk_also_after_a_restart(serve):
    server, blocks = serve(), fresh(30)
    for number, content in blocks.items():
        server.store({number: content})
        server.settle()
    assert {number: server.load(number) for number in blocks} == blocks
    server = serve()
    assert {number: server.load(number) for number in blocks} == blocks
    assert server.load(99) is None


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"model": "another/model"},
        {"parallel": {"world_size": 4, "tp_size": 4}},
        {"parallel": {"dcp_size": 2}},
        {"canonical_layout": True},
        {"kv_cache_layout": "HND"},
    ],
    ids=str,
)
def test_chunks_of_another_kind_are_never_read(serve, other):
    server, blocks = serve(), fresh(4)
    server.store(blocks)
    server.settle()
    assert [serve().load(number) for number in blocks] == list(blocks.values())
    assert [serve(**other).load(number) for number in blocks] == [None] * 4


def test_a_revision_tells_weights_apart(serve, tmp_path, caplog):
    server, blocks = serve(), fresh(2)
    server.store(blocks)
    server.settle()
    disk = disk_at(tmp_path / "disk")
    assert serve({**disk, "revision": "2"}).load(0) is None
    caplog.clear()
    assert serve(disk).load(0) is None
    assert "has no revision" in caplog.text


def test_the_disk_is_bounded_and_evicts(serve, tmp_path):
    server = serve()
    blocks = fresh(3000)  # 24 MB
    for first in range(0, 3000, 3):
        server.store({number: blocks[number] for number in range(first, first + 3)})
        server.settle()
    used = sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*") if file.is_file())
    assert used <= 16 << 20
    found = [number for number in range(0, 3000, 50) if server.load(number) is not None]
    assert 0 < len(found) < 60
    assert min(found) > 500, "the oldest went first"
    assert all(server.load(number) == blocks[number] for number in found)


def test_a_damaged_chunk_is_a_miss_and_its_neighbours_are_not(serve, tmp_path):
    server, blocks = serve(), fresh(20)
    for number, content in blocks.items():
        server.store({number: content})
        server.settle()
    serve(disk_at(tmp_path / "other"))
    (file,) = (tmp_path / "disk").rglob("blocks*")
    data = bytearray(file.read_bytes())
    at = data.find(blocks[7])
    data[at + 100] ^= 1
    file.write_bytes(data)
    server = serve()
    got = {number: server.load(number) for number in blocks}
    assert got == {**blocks, 7: None}
    assert server.load(7) is None  # and is not asked for again for ever


def test_settings_are_checked(serve, tmp_path):
    with pytest.raises(ConfigError, match="needs disk or remote"):
        serve({})
    with pytest.raises(ConfigError, match=r"secondary_tiers: KvferryTier.*dsk.*disk"):
        serve({"dsk": str(tmp_path)})


def test_a_reset_of_the_primary_tier_waits_for_copies(serve):
    server, blocks = serve(), fresh(5)
    server.store(blocks)
    server.manager.reset_cache()
    server.rows[:] = 0xEE
    assert [server.load(number) for number in blocks] == list(blocks.values())


def test_random_lives(serve):
    """Every chunk that is found has its own bytes, whatever was evicted, and across restarts."""
    rng = np.random.default_rng()
    truth: dict[int, bytes] = {}
    hits = 0
    server = serve()
    for _ in range(300):
        numbers = rng.integers(0, 60, int(rng.integers(1, 4))).tolist()
        action = rng.random()
        if action < 0.45:
            for number in numbers:
                truth.setdefault(number, secrets.token_bytes(CHUNK))
            server.store({number: truth[number] for number in numbers})
        elif action < 0.95:
            for number in numbers:
                got = server.load(number)
                assert got is None or got == truth[number]
                hits += got is not None
        elif action < 0.98:
            server.manager.reset_cache()
            server.rows[:] = 0xEE
        else:
            server = serve()
        server.step()
    assert hits > 50


def test_two_servers_share_a_bucket(serve, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    endpoint = s3_servers.server("rclone").endpoint
    prefix = secrets.token_hex(4)
    store = {"remote": f"s3://{s3_servers.BUCKET}/{prefix}?endpoint={endpoint}", "revision": "1"}
    server, blocks = serve(store), fresh(8)
    for number, content in blocks.items():
        server.store({number: content})
        server.settle()
    server = serve(store)
    assert {number: server.load(number) for number in blocks} == blocks
    assert server.load(77) is None
    assert serve({**store, "revision": "2"}).load(0) is None
