"""A Mooncake store on bad days: masters and peers that die, lines that are cut."""

from __future__ import annotations

import re
import secrets
import time

import pytest
from tests.fakes import mooncake_store, s3_servers
from tests.fakes.mooncake_fleet import ALL, Fleet, is_well
from tests.fakes.mooncake_fleet import fleet as fleet  # a fixture
from tests.fakes.remote import LONG

from kvferry.tiers.contract import Way

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())

SEGMENT = "&segment=16MiB"


def test_one_server_writes_and_another_reads(fleet: Fleet) -> None:
    """Each through a process of its own; by the master's HTTP metadata server for once."""
    metadata = fleet.master.metadata
    writer = fleet.server(f"&protocol=tcp{SEGMENT}", metadata=metadata)
    reader = fleet.server("&protocol=tcp", metadata=metadata)
    other = secrets.token_bytes(32)
    stranger = fleet.server("&protocol=tcp", metadata=metadata, namespace=other)
    writer.write(ALL)
    assert reader.do(Way.FIND, ALL).ok.all()
    assert reader.reads(ALL) == [True] * 8
    assert not stranger.do(Way.FIND, ALL).ok.any()
    reader.tier.forget()
    assert reader.reads(ALL) == [False] * 8
    assert writer.reads(ALL) == [True] * 8, "what is shared is not one server's to remove"


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
    store.wait_ailing("no room")
    fleet.peer()
    store.wait_healed()
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
