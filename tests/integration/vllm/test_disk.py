"""A disk below host memory under a real vLLM: across restarts, crashes, changes and failures."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm import models
from tests.integration.vllm.engine import BLOCK_TOKENS, FERRY, LONG, Engine, make_prompts
from tests.integration.vllm.server import Server

LENGTHS = (300, 200, 100)
BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)


def ferry(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        **FERRY,
        "disk": str(folder),
        "disk_size": "64MiB",
        "disk_keep_free": 0,
        "tier_write": "through",
        "promote_deadline": "5min",
        "disk_deadline": "5min",
        **settings,
    }


def await_disk(engine: Engine, num_blocks: int) -> None:
    """Step until so many blocks are on disk, and durable."""
    give_up = time.monotonic() + LONG
    while engine.stats.tiers["disk"].cached < num_blocks or pending(engine):
        assert time.monotonic() < give_up, engine.stats
        engine.step()
        time.sleep(0.002)


def pending(engine: Engine) -> int:
    return int(sum(disk.pending for disk in engine.worker._memory.disks().values()))


def drive_pids(folder: Path) -> list[int]:
    """The drive processes of this process that serve this directory."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            fds = [os.readlink(fd) for fd in Path(f"/proc/{name}/fd").iterdir()]
        except OSError:
            continue
        if int(parent) == os.getpid() and any(str(folder) in fd for fd in fds):
            found.append(int(name))
    return found


def test_a_restart_is_warm_and_says_the_same(start, expect, llama, tmp_path):
    prompts = make_prompts(301, *LENGTHS)
    expected = expect(llama, prompts)
    engine = start(llama, ferry=ferry(tmp_path))
    assert engine.generate(prompts) == expected
    await_disk(engine, BLOCKS)
    engine = start(llama, ferry=ferry(tmp_path))
    assert engine.stats.restored == {"disk": engine.stats.tiers["disk"].cached}
    assert engine.stats.restored["disk"] >= BLOCKS
    assert engine.generate(prompts) == expected
    assert engine.stats.promoted_tokens == BLOCKS * BLOCK_TOKENS
    assert engine.stats.hit_tokens == BLOCKS * BLOCK_TOKENS
    assert engine.stats.lost_blocks == 0
    engine.check_idle()


def test_hybrid_models_are_warm_too(start, expect, gemma_hits, tmp_path):
    prompts = make_prompts(302, *LENGTHS)
    expected = expect(gemma_hits, prompts)
    engine = start(gemma_hits, ferry=ferry(tmp_path), num_gpu_blocks_override=200)
    assert engine.generate(prompts) == expected
    engine.settle()
    await_disk(engine, 1)
    engine = start(gemma_hits, ferry=ferry(tmp_path), num_gpu_blocks_override=200)
    assert engine.generate(prompts) == expected
    assert engine.stats.promoted_tokens > 0
    engine.check_idle()


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 2 * BLOCK_TOKENS},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_was_stored_otherwise_is_never_read(start, llama, tmp_path, what):
    prompts = make_prompts(303, *LENGTHS)
    engine = start(llama, **OTHERS[what])
    expected = engine.generate(prompts)
    engine = start(llama, ferry=ferry(tmp_path))
    engine.generate(prompts)
    await_disk(engine, BLOCKS)
    engine = start(llama, ferry=ferry(tmp_path, disk_size="128MiB"), **OTHERS[what])
    assert engine.stats.restored == {"disk": 0}
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == 0
    engine.check_idle()


def test_other_weights_under_the_same_name_find_nothing(start, expect, llama, tmp_path):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    prompts = make_prompts(304, *LENGTHS)
    engine = start(model, ferry=ferry(tmp_path / "disk"))
    assert engine.generate(prompts) == expect(llama, prompts)
    await_disk(engine, BLOCKS)
    trained = models.make_llama(tmp_path / "trained", seed=7)
    shutil.rmtree(model)
    shutil.copytree(trained, model)
    engine = start(model, is_fresh=True, ferry=ferry(tmp_path / "disk"))
    assert engine.stats.restored == {"disk": 0}
    assert engine.generate(prompts) == expect(trained, prompts)
    assert engine.stats.hit_tokens == 0
    engine.check_idle()


@pytest.mark.timeout(900)
def test_a_server_killed_is_warm_until_it_was_told_to_forget(start, expect, llama, tmp_path):
    """Though it only spills, and host memory had room: at rest it wrote out what it had."""
    prompts = make_prompts(306, *LENGTHS)
    settings = ferry(tmp_path / "disk", tier_write="spill")
    expected = expect(llama, prompts)
    server = Server(llama, tmp_path / "first.log", ferry=settings)
    assert [server.tokens(prompt) for prompt in prompts] == expected
    await_slots(server, BLOCKS)
    await_durable(server)
    server.kill()
    engine = start(llama, ferry=settings)
    assert engine.stats.restored["disk"] >= BLOCKS
    assert engine.generate(prompts) == expected
    assert engine.stats.promoted_tokens == BLOCKS * BLOCK_TOKENS
    engine.check_idle()
    engine.is_spoiled = True
    engine.llm.llm_engine.engine_core.shutdown()
    server = Server(llama, tmp_path / "second.log", ferry=settings)
    assert [server.tokens(prompt) for prompt in prompts] == expected
    give_up = time.monotonic() + LONG
    while not server.post("/reset_prefix_cache", {})["success"]:  # copies may still hold blocks
        assert time.monotonic() < give_up
        time.sleep(0.1)
    server.post("/pause?mode=keep", {})  # vLLM may step on all the same, if it has the time
    assert server.post("/reset_prefix_cache?reset_external=true", {})["success"]
    server.kill()
    engine = start(llama, ferry=settings)
    assert engine.stats.restored == {"disk": 0}
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == 0


def await_slots(server: Server, num_blocks: int) -> None:
    """Until a server says that so many blocks, or more, are on disk."""
    give_up = time.monotonic() + LONG
    while True:
        found = server.metric("vllm:kvferry_slots", state="cached", tier="disk")
        if found >= num_blocks:
            return
        assert time.monotonic() < give_up, found
        server.complete([1, 2, 3])  # what was counted is told with a step
        time.sleep(0.5)


def await_durable(server: Server) -> None:
    """Until what a server has on disk outlives it."""
    time.sleep(3)  # promised after one; and figures are told once a second
    server.wait_for("vllm:kvferry_pending_blocks", 0, most=0, tier="disk")
    time.sleep(2)


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def die(folder: Path) -> None:
    for pid in drive_pids(folder):
        os.kill(pid, signal.SIGKILL)


def hang(folder: Path) -> None:
    for pid in drive_pids(folder):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("how", [vanish, die, hang])
def test_the_server_goes_on_without_its_disk(start, expect, llama, tmp_path, how):
    prompts = make_prompts(308, *[200] * 10)
    expected = expect(llama, prompts)
    folder = tmp_path / "disk"
    settings = ferry(folder, host=f"{24 * 64}KiB", disk_deadline=1, promote_deadline=5)
    engine = start(llama, ferry=settings, num_gpu_blocks_override=24)
    assert [engine.generate([prompt])[0] for prompt in prompts[:5]] == expected[:5]
    give_up = time.monotonic() + LONG
    while not (pids := drive_pids(folder)):  # one that was too slow for its deadline comes back
        assert time.monotonic() < give_up
        engine.step()
    try:
        how(folder)
        for _ in range(2):
            assert [engine.generate([prompt])[0] for prompt in prompts] == expected
            engine.forget_device()
        assert engine.side.guard.reason == ""
    finally:
        for pid in pids:
            if how is hang and Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)
