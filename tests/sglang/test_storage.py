"""The storage back end behind SGLang's own HiCache controller and host pools, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import torch
from tests.fakes.drives import signal_drives
from tests.sglang.cpu import (
    LONG,
    PAGE,
    HybridServer,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    Server,
    get_hash_str,
)

from kvferry.connectors.sglang.storage import weights_of

LAYOUTS = ("page_first", "page_first_direct", "layer_first")


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
    """Starts servers on one disk, one after the other, and ends them."""
    servers: list[Server] = []

    def start(settings: dict | None = None, *, kind: type = Server, **options) -> Server:
        while servers:
            servers.pop().close()
        disk = disk_at(tmp_path / "disk")
        given = {**disk, "revision": "1"} if settings is None else settings
        servers.append(kind(given, **options))
        return servers[0]

    yield start
    for server in servers:
        server.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(30_000) for _ in range(count * PAGE)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_also_after_a_restart(serve, layout):
    server, prompt = serve(layout=layout), tokens(20)
    pages = server.backup(prompt)
    assert server.prefetch(prompt + tokens(2, seed=1)) == pages
    assert server.prefetch(tokens(3, seed=2)) == []
    server = serve(layout=layout)
    assert server.prefetch(prompt) == pages
    assert server.prefetch(prompt[: 5 * PAGE] + tokens(4, seed=3)) == pages[:5]


@pytest.mark.parametrize(
    ("other", "settings"),
    [
        ({"dtype": torch.float16}, {}),
        ({"layers": 4}, {}),
        ({"model": "another/model"}, {}),
        ({"layout": "layer_first"}, {}),
        ({}, {"revision": "2"}),
    ],
    ids=str,
)
def test_pages_of_another_kind_are_never_read(serve, tmp_path, other, settings):
    server, prompt = serve(), tokens(4)
    pages = server.backup(prompt)
    disk = disk_at(tmp_path / "disk")
    assert serve().prefetch(prompt) == pages
    assert serve({**disk, "revision": "1", **settings}, **other).prefetch(prompt) == []


def test_without_known_weights_nothing_is_shared(serve, tmp_path, caplog):
    server = serve(disk_at(tmp_path / "disk"))
    assert "which weights" in server.storage.idle_reason
    assert "kvferry is idle" in caplog.text
    server.backup(tokens(4))
    assert server.prefetch(tokens(4)) == []


def test_weights_are_told_by_commit_or_by_their_files(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    args = SimpleNamespace(model_path="m", revision=commit, load_format="auto")
    assert weights_of(args) == commit
    folder = tmp_path / "snapshots" / commit
    folder.mkdir(parents=True)
    local = SimpleNamespace(model_path=str(folder), revision=None, load_format="auto")
    assert weights_of(local) == commit
    plain = tmp_path / "model"
    plain.mkdir()
    local.model_path = str(plain)
    assert weights_of(local) == ""
    (plain / "config.json").write_text("{}")
    (plain / "model.safetensors").write_bytes(b"1234")
    first = weights_of(local)
    assert first
    assert weights_of(local) == first
    (plain / "model.safetensors").write_bytes(b"12345")
    assert weights_of(local) not in ("", first)
    local.load_format = "dummy"
    assert weights_of(local) == ""
    assert weights_of(None) == ""


def test_settings_are_checked(serve, tmp_path):
    with pytest.raises(ValueError, match="needs disk or remote"):
        serve({})
    with pytest.raises(ValueError, match=r"extra-config.*dsk.*disk"):
        serve({"dsk": str(tmp_path)})
    with pytest.raises(ValueError, match="interface_v1"):
        serve({"disk": str(tmp_path), "interface_v1": 0})


def test_random_lives(serve):
    """Prompts that share beginnings: what comes back is the longest stored beginning, unchanged."""
    chooser = random.Random(os.urandom(8))
    stems = [tokens(4, seed) for seed in range(6)]
    truth: dict[tuple[int, ...], bytes] = {}
    server, hits = serve(), 0
    for _ in range(150):
        prompt = chooser.choice(stems)[: chooser.randrange(1, 5) * PAGE]
        prompt = prompt + tokens(chooser.randrange(0, 4), chooser.randrange(100, 112))
        names = [tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)]
        action = chooser.random()
        if action < 0.4:
            fresh = [name for name in names if name not in truth]
            pages = server.backup(prompt)
            made = dict(zip(names, pages, strict=True))
            truth |= {name: made[name] for name in fresh}
        elif action < 0.97:
            stored = [truth[name] for name in names if name in truth]
            assert server.prefetch(prompt) == stored
            hits += len(stored)
        else:
            server = serve()
    assert hits > 100


def test_the_disk_is_bounded(serve, tmp_path):
    server = serve(tokens=2048)
    for seed in range(250):
        server.backup(tokens(30, seed))  # 23 MB in all
    used = sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*") if file.is_file())
    assert used <= 16 << 20
    assert server.prefetch(tokens(30, 0)) == []
    assert len(server.prefetch(tokens(30, 249))) == 30


def test_a_damaged_page_ends_the_hit(serve, tmp_path):
    server, prompt = serve(), tokens(10)
    pages = server.backup(prompt)
    server.close()
    (file,) = (tmp_path / "disk").rglob("blocks*")
    content = bytearray(file.read_bytes())
    at = content.find(pages[6])
    assert at >= 0
    content[at + 9] ^= 1
    file.write_bytes(content)
    server = Server({**disk_at(tmp_path / "disk"), "revision": "1"})
    try:
        assert server.prefetch(prompt) == pages[:6]
        assert server.prefetch(prompt) == pages[:6]
    finally:
        server.close()


def test_a_hybrid_prompt_comes_back_with_its_window_and_state(serve):
    server, prompt = serve(kind=HybridServer), tokens(10)
    short, long = prompt[: 6 * PAGE], prompt
    stored = {len(each): server.backup_all(each) for each in (short, long)}
    pages, parts = stored[len(long)]
    pages = stored[len(short)][0] + pages[6:]  # what is there already stays
    assert server.prefetch_all(long + tokens(2, seed=1)) == (pages, parts)
    # No state was stored behind the eighth page, so a request for it stops at the sixth.
    short_parts = stored[len(short)][1]
    assert server.prefetch_all(long[: 8 * PAGE]) == (pages[:6], short_parts)
    assert server.prefetch_all(long[: 5 * PAGE]) == ([], [])
    server = serve(kind=HybridServer)
    assert server.prefetch_all(long) == (pages, parts)


def test_hybrid_lives_on_a_small_disk(serve):
    """Pools evict apart from each other: what comes back is whole, and of that very prompt."""
    chooser = random.Random(os.urandom(8))
    server, hits = serve(kind=HybridServer), 0
    truth: dict[tuple[int, ...], tuple[list[bytes], list[bytes]]] = {}
    for _ in range(120):
        prompt = tokens(chooser.randrange(4, 9), chooser.randrange(20))
        name = tuple(prompt)
        if chooser.random() < 0.4 and name not in truth:
            truth[name] = server.backup_all(prompt)
        elif chooser.random() < 0.95:
            pages, parts = server.prefetch_all(prompt)
            hits += bool(pages)
            # Prompts of one seed begin alike: a page or a state belongs to one of them.
            for at, page in enumerate(pages):
                same = [
                    t for n, t in truth.items() if n[: (at + 1) * PAGE] == name[: (at + 1) * PAGE]
                ]
                assert page in [t[0][at] for t in same if len(t[0]) > at]
            if parts:
                end = name[: len(pages) * PAGE]
                assert parts[-2:] == truth[end][1][-2:]
        else:
            server = serve(kind=HybridServer)
    assert hits > 15


def test_whole_groups_are_counted_and_never_shorten_the_hit(serve):
    server, prompt = serve(kind=HybridServer), tokens(8)
    server.backup_all(prompt)
    hashes = [f"group-{at}" for at in range(6)]
    window = server.window.alloc(4 * PAGE)
    groups = PoolTransfer(PoolName.SWA, window, None, hashes[:4])
    assert server.storage.batch_set_v2([groups]) == {PoolName.SWA: [True] * 4}
    asked = PoolTransfer(
        PoolName.SWA, None, None, hashes, PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=3
    )
    found = server.storage.batch_exists_v2(get_hash_str(prompt, None, page_size=PAGE), [asked])
    assert found.kv_hit_pages == 8
    assert found.extra_pool_hit_pages == {"kv": 8, PoolName.SWA: 4}
    assert server.storage.batch_get_v2(
        [PoolTransfer(PoolName.INDEXER, window, None, hashes[:4])]
    ) == {PoolName.INDEXER: [False] * 4}


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
def test_a_drive_that_dies_or_hangs_is_a_miss_within_its_deadline(serve, tmp_path, fault):
    disk = disk_at(tmp_path / "disk")
    server = serve({**disk, "revision": "1", "disk_deadline": "1s", "promote_deadline": "1s"})
    prompt = tokens(12)
    pages = server.backup(prompt)
    signal_drives(fault)
    came = server.prefetch(prompt)
    assert came == pages[: len(came)]
    end = time.monotonic() + LONG
    while server.prefetch(prompt) != pages:  # the drive's process is started again
        assert time.monotonic() < end
        time.sleep(0.1)


RANK = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from tests.sglang.cpu import PAGE, Server, start_distributed
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
settings, mla = json.loads(sys.argv[4]), sys.argv[5] == "mla"
start_distributed(rank, 2, port)
prompt = list(range(8 * PAGE))
server = Server(settings, mla=mla)
pages = server.backup(prompt)
server.close()
dist.barrier()
server = Server(settings, mla=mla)
came = server.prefetch(prompt)
server.close()
assert len(came) == 8 and (came == pages) is (rank == 0 or not mla), (rank, len(came))
Path(folder, f"rank-{rank}").write_bytes(b"".join(came))
"""


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_have_their_own_parts_but_all_ranks_of_mla_read_what_one_wrote(tmp_path, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    disk = disk_at(tmp_path / "disk", "32MiB")
    settings = disk if kind == "mha" else {"remote": f"file://{tmp_path}", "lookup_deadline": "20s"}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", RANK, str(rank), str(port), str(tmp_path)),
                *(json.dumps({**settings, "revision": "1"}), kind),
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=280)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said[0][-3000:] + said[1][-3000:]
    one, two = ((tmp_path / f"rank-{rank}").read_bytes() for rank in range(2))
    assert len(one) == len(two) > 0
    assert (one == two) is (kind == "mla")


def test_conversations_come_back_through_the_radix_cache(serve):
    """From the device to the disk, and by another server's radix cache onto its device."""
    from tests.sglang.radix import RadixServer, computed_for

    chooser = random.Random(os.urandom(8))
    fetched = 0
    for _ in range(4):
        server = serve(kind=RadixServer)
        for _ in range(6):
            prompt = tokens(3, chooser.randrange(2))
            prompt += tokens(chooser.randrange(0, 4), chooser.randrange(10, 14))
            assert torch.equal(server.serve(prompt), computed_for(prompt))
        fetched += server.num_fetched
    assert fetched > 0
