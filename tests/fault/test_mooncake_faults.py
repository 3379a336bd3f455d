"""A Mooncake store on bad days: masters and peers that die, lines that are cut."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator

import pytest
from tests.fakes import mooncake_store, remote, s3_servers
from tests.fakes.remote import LONG, Store

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.tier import RemoteTier

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())

ALL = list(range(8))
Open = Callable[..., Store]


@pytest.fixture
def master() -> Iterator[mooncake_store.Master]:
    """One that a test may kill."""
    made = mooncake_store.Master()
    made.start()
    yield made
    made.kill()


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[RemoteTier] = []

    def open_one(place: str, options: str = "", namespace: bytes | None = None) -> Store:
        namespace = namespace or secrets.token_bytes(32)
        slots = remote.mapped_slots(16)
        opened.append(
            remote.open_mooncake_tier(
                place,
                options,
                namespace=namespace,
                environment_=mooncake_store.environment(),
                slots=slots,
            )
        )
        return Store(opened[-1], namespace, slots)

    yield open_one
    for tier in opened:
        tier.close()


def test_one_server_writes_and_another_reads(
    open_store: Open, master: mooncake_store.Master
) -> None:
    """Each through a process of its own; by the master's HTTP metadata server for once."""
    options = f"?metadata={master.metadata}&protocol=tcp"
    writer = open_store(master.place, f"{options}&segment=16MiB")
    reader = open_store(master.place, options, namespace=writer.objects.namespace)
    stranger = open_store(master.place, options)
    writer.write(ALL)
    reader.rows[:] = writer.rows
    assert reader.do(Way.FIND, ALL).ok.all()
    assert reader.reads(ALL) == [True] * 8
    assert not stranger.do(Way.FIND, ALL).ok.any()
    reader.tier.forget()
    assert reader.reads(ALL) == [False] * 8
    assert writer.reads(ALL) == [True] * 8, "what is shared is not one server's to remove"


def test_a_master_killed_and_started_again(open_store: Open, master: mooncake_store.Master) -> None:
    store = open_store(master.place, "?segment=16MiB")
    store.write(ALL)
    master.kill()
    store.into[:] = 0xEE
    store.lose(Way.READ, ALL)
    store.send(Way.FIND, [0])
    assert len(store.tier.poll()) == 1, "nobody waits for a store that is away"
    master.start()
    store.wait_healed()
    assert store.reads(ALL) == [False] * 8, "a master remembers nothing"
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8


def test_a_master_that_is_away_at_the_start(
    open_store: Open, master: mooncake_store.Master
) -> None:
    master.kill()
    store = open_store(master.place, "?segment=16MiB")
    store.wait_ailing("cannot be reached")
    master.start()
    store.wait_healed()
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("metadata=http://127.0.0.1:9/metadata", "the metadata server at 127.0.0.1:9 cannot be"),
        ("segment=4000TiB", r"cannot be joined .*; has this machine 4000TiB to give\?"),
    ],
)
def test_what_keeps_a_server_from_joining_is_named(
    open_store: Open, master: mooncake_store.Master, options: str, reason: str
) -> None:
    store = open_store(master.place, f"?{options}")
    store.wait(lambda: re.search(reason, store.tier.ailment) is not None)


def test_a_store_without_memory_says_so(open_store: Open, master: mooncake_store.Master) -> None:
    store = open_store(master.place)
    store.wait_ailing("no room")
    peer = mooncake_store.Peer(master)
    store.wait_healed()
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8
    peer.close()


def test_a_peer_lost_takes_its_blocks_and_nothing_else(
    open_store: Open, master: mooncake_store.Master
) -> None:
    first, second = mooncake_store.Peer(master), mooncake_store.Peer(master)
    store = open_store(master.place)
    store.write(ALL)
    assert store.reads(ALL) == [True] * 8
    first.kill()
    store.do(Way.READ, ALL, within=1.0)
    third = mooncake_store.Peer(master)

    def is_well() -> bool:
        """Bytes are right at every step; at last all can be written and read again."""
        if store.tier.ailment:
            return False
        came = store.reads(ALL)
        missing = [number for number in ALL if not came[number]]
        if missing:
            store.do(Way.WRITE, missing, within=2.0)
        return not missing

    store.wait(is_well)
    second.close()
    third.close()


def test_a_held_up_master_costs_one_deadline(
    open_store: Open, master: mooncake_store.Master
) -> None:
    wire = s3_servers.Wire(master.port)
    store = open_store(f"127.0.0.1:{wire.port}", "?segment=16MiB")
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
