"""A Mooncake store on bad days: masters and peers that die, lines that are cut."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fakes import mooncake_store, s3_servers
from tests.fakes.mooncake_fleet import ALL, Fleet, is_well
from tests.fakes.mooncake_fleet import fleet as fleet  # a fixture
from tests.fakes.remote import LONG

from kvferry.tiers.contract import Way

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())

SEGMENT = "&segment=16MiB"


def test_a_master_killed_and_started_again(fleet: Fleet) -> None:
    store = fleet.server(SEGMENT)
    store.write(ALL)
    fleet.master.kill()
    store.into[:] = 0xEE
    store.lose(Way.READ, ALL)
    store.send(Way.FIND, [0])
    assert len(store.tier.poll()) == 1, "nobody waits for a store that is away"
    fleet.master.start()
    store.wait_healed()
    assert store.reads(ALL) == [False] * 8, "a master remembers nothing"
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8


def test_a_master_that_is_away_at_the_start(fleet: Fleet) -> None:
    fleet.master.kill()
    store = fleet.server(SEGMENT)
    store.wait_ailing("cannot be reached")
    fleet.master.start()
    store.wait_healed()
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"metadata": "http://127.0.0.1:9/metadata"},
            "the metadata server at 127.0.0.1:9 cannot be",
        ),
        (
            {"options": "&segment=4000TiB"},
            r"joined .*; has this machine 4000TiB to give\?",
        ),
    ],
)
def test_what_keeps_a_server_from_joining_is_named(
    fleet: Fleet, options: dict[str, str], reason: str
) -> None:
    store = fleet.server(**options)  # type: ignore[arg-type]
    store.wait(lambda: re.search(reason, store.tier.ailment) is not None)


def test_a_store_without_memory_says_so(fleet: Fleet) -> None:
    store = fleet.server()
    store.wait(lambda: "no room" in store.tier.refusal_to_write)
    assert not store.do(Way.FIND, ALL).ok.any(), "it is asked all the same"
    assert not store.tier.ailment
    fleet.peer()
    store.wait(lambda: not store.tier.refusal_to_write)
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8


def test_a_peer_lost_takes_its_blocks_and_nothing_else(fleet: Fleet) -> None:
    first, _ = fleet.peer(), fleet.peer()
    store = fleet.server()
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8
    first.kill()
    store.do(Way.READ, ALL, within=1.0)
    fleet.peer()
    store.wait(lambda: is_well(store))


def test_a_held_up_master_costs_one_deadline(fleet: Fleet) -> None:
    wire = s3_servers.Wire(fleet.master.port)
    store = fleet.server(SEGMENT, place=f"127.0.0.1:{wire.port}")
    store.write(ALL)
    wire.is_held = True
    store.into[:] = 0xEE
    begun = time.monotonic()
    store.lose(Way.READ, ALL)
    assert time.monotonic() - begun < LONG
    wire.is_held = False
    store.wait_healed()
    store.write(ALL)  # its segment may have been given up meanwhile
    assert store.reads(ALL) == [True] * 8
    wire.cut()
    store.wait(lambda: not store.tier.ailment and all(store.reads(ALL)))
    wire.close()


_ENGINE = """
import sys, time
from tests.fakes import mooncake_store, remote
tier = remote.open_mooncake_tier(
    sys.argv[1], "?metadata=P2PHANDSHAKE&segment=16MiB", namespace=bytes(32),
    environment_=mooncake_store.environment(),
)
print(tier._child.pid, flush=True)
while True:
    tier.poll()
    print(tier.ailment or "well", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_process_ends_with_its_engine_though_the_master_hangs(
    is_joined: bool, fleet: Fleet
) -> None:
    """Seen red: leaving or joining a master that hangs takes a minute and a half, in one call."""
    if not is_joined:
        fleet.master.signal(signal.SIGSTOP)
    command = [sys.executable, "-c", _ENGINE, fleet.master.place]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    wanted = "well" if is_joined else "cannot be reached"
    while wanted not in engine.stdout.readline():
        pass
    if is_joined:
        fleet.master.signal(signal.SIGSTOP)
    try:
        engine.kill()
        killed = time.monotonic()
        while Path(f"/proc/{pid}").exists() and "(zombie)" not in _state(pid):
            assert time.monotonic() < killed + 20.0, "it hangs"
            time.sleep(0.01)
        print(f"ended {time.monotonic() - killed:.2f} s after its engine")
    finally:
        fleet.master.signal(signal.SIGCONT)
        engine.wait()
        engine.stdout.close()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
