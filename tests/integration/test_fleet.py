"""Servers that share nothing but a store: one writes, another hits, bytes equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import mooncake_store, remote, s3_servers
from tests.integration.one_of_a_fleet import BLOCKS

ROOT = Path(__file__).parents[2]
Settings = dict[str, str]
Stores = Callable[[], tuple[Settings, Callable[[], None]]]


def _s3() -> tuple[Settings, Callable[[], None]]:
    server = s3_servers.S3Server("rclone")
    server.start()
    address = f"s3://{s3_servers.BUCKET}/fleet?endpoint={server.endpoint}"
    return {"KVFERRY_REMOTE": address, **remote.CREDENTIALS}, server.close


def _mooncake() -> tuple[Settings, Callable[[], None]]:
    master = mooncake_store.Master()
    master.start()
    peer = mooncake_store.Peer(master)

    def close() -> None:
        peer.kill()
        master.kill()

    address = f"mooncake://{master.place}"
    return {"KVFERRY_REMOTE": address, **mooncake_store.environment()}, close


STORES: dict[str, Stores] = {"s3": _s3}
if not mooncake_store.lacking():
    STORES["mooncake"] = _mooncake


@pytest.fixture(params=sorted(STORES))
def settings(request: pytest.FixtureRequest) -> Iterator[Settings]:
    made, close = STORES[request.param]()
    yield made
    close()


def serve(settings: Mapping[str, str], what: str, seed: int = 1, model: str = "m") -> Any:
    """One server's whole life."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.one_of_a_fleet", what, str(seed), model],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        timeout=110,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_server_computes_and_another_hits(settings: Settings) -> None:
    stored = serve(settings, "store")
    assert stored["moved"]["host-remote"] > 0
    loaded = serve(settings, "load")
    assert loaded["hit"] == BLOCKS
    assert loaded["is_right"]
    assert loaded["moved"]["remote-host"] == stored["moved"]["host-remote"]
    assert serve(settings, "load", model="another")["hit"] == 0, "another model"
