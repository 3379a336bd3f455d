"""The storage for engines that own their host memory, without an engine."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from tests.fakes.crafted_keys import keys

from kvferry.config import Config
from kvferry.connectors.common.storage import Storage
from kvferry.tiers.contract import TierSetup
from kvferry.types import TierName

SIZE, COUNT, LONG = 4096, 8, 30.0


class Engine:
    """An engine's memory, block ``n`` of which has key ``n``."""

    def __init__(self, disk: Path) -> None:
        self.rows = np.random.default_rng(3).integers(0, 256, (COUNT, SIZE), dtype=np.uint8)
        self.kept = self.rows.copy()
        settings = {"disk": str(disk), "disk_size": "8MiB", "disk_keep_free": "0"}
        config = Config.load(overrides={**settings, "disk_start_deadline": "20s"}, env={})
        setup = TierSetup(TierName(""), SIZE, namespace=bytes(32), family=bytes(32))
        self.storage = Storage(config, setup, [SIZE])

    def move(self, verb: str) -> list[bool]:
        addresses = self.rows.ctypes.data + np.arange(COUNT)[:, None] * SIZE
        job = getattr(self.storage, verb)(keys(range(COUNT)), addresses)
        self.storage.drain()
        assert job.is_done
        return [bool(ok) for ok in job.ok]

    def load(self) -> list[bool]:
        self.rows[:] = 0xEE
        ok = self.move("load")
        assert (self.rows[ok] == self.kept[ok]).all()
        return ok


def test_a_drive_that_comes_after_the_start_serves_what_it_has(tmp_path: Path) -> None:
    """Seen red where its blocks were not taken up, and places were given that it has not."""
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    engine = Engine(disk / "store")
    assert engine.move("store") == [True] * COUNT
    engine.storage.close()
    disk.rename(mount)
    disk.write_text("a drive that is not mounted")
    engine = Engine(disk / "store")
    try:
        assert engine.storage._levels[0].medium.ailment
        assert engine.load() == [False] * COUNT
        disk.unlink()
        mount.rename(disk)
        end = time.monotonic() + LONG
        while engine.load() != [True] * COUNT:
            assert time.monotonic() < end, engine.storage._levels[0].medium.ailment
            time.sleep(0.05)
    finally:
        engine.storage.close()


def test_what_is_reset_stays_away_and_what_follows_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "disk")
    assert engine.move("store") == [True] * COUNT
    engine.storage.reset()
    assert engine.load() == [False] * COUNT
    engine.storage.close()
    engine = Engine(tmp_path / "disk")
    assert engine.load() == [False] * COUNT
    engine.rows[:] = engine.kept
    assert engine.move("store") == [True] * COUNT
    engine.storage.close()
    engine = Engine(tmp_path / "disk")
    assert engine.load() == [True] * COUNT
    engine.storage.close()
