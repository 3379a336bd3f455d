"""A shared store on bad days: a fault is a miss for the blocks it touched, and ends by itself."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import obstore
import pytest
from tests.fakes import remote, s3_servers
from tests.fakes.certificates import make_certificate
from tests.fakes.crafted_keys import keys
from tests.fakes.remote import LONG, SIZE, Store

from kvferry.tiers.contract import Way
from kvferry.tiers.remote import tier as tier_module
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.tier import RemoteTier

every_server = pytest.mark.parametrize("kind", s3_servers.SERVERS)
Open = Callable[..., Store]


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[RemoteTier] = []

    def open_one(endpoint: str, namespace: bytes = b"", **more) -> Store:
        namespace = namespace or secrets.token_bytes(32)
        opened.append(remote.open_s3(endpoint, SIZE, namespace=namespace, **more))
        return Store(opened[-1], namespace)

    yield open_one
    for tier in opened:
        tier.close()


@pytest.fixture
def own_server() -> Iterator[s3_servers.S3Server]:
    """One that a test may kill. It keeps its objects on disk."""
    server = s3_servers.S3Server("rclone")
    server.start()
    yield server
    server.close()


@pytest.fixture
def wire() -> Iterator[s3_servers.Wire]:
    made = s3_servers.Wire(s3_servers.server("rclone").port)
    yield made
    made.close()


@pytest.fixture
def door() -> Iterator[s3_servers.Door]:
    made = s3_servers.Door(s3_servers.server("rclone"))
    yield made
    made.fault = None
    made.close()


def _damages(store: Store, good: list[bytes]) -> dict[int, bytes]:
    flipped = bytearray(good[0])
    flipped[SIZE // 2] ^= 4
    in_seal = bytearray(good[5])
    in_seal[-1] ^= 1
    stranger = ObjectFormat(secrets.token_bytes(32), SIZE)
    block = memoryview(good[6])[:SIZE]
    return {
        0: bytes(flipped),
        1: good[1][:-1],
        2: b"",
        3: good[4],  # another block of ours, whole
        5: bytes(in_seal),
        6: bytes(block) + stranger.seal(block, store.objects.namespace),  # another namespace's
        7: secrets.token_bytes(len(good[7])),
    }


@every_server
def test_a_damaged_object_is_a_miss_and_is_replaced(kind: str, open_store: Open) -> None:
    store = open_store(s3_servers.server(kind).endpoint)
    store.write(list(range(8)))
    bucket = remote.bucket(kind)
    names = [f"tests/{name}" for name in store.objects.names(keys(range(8)))]
    good = [bytes(obstore.get(bucket, name).bytes()) for name in names]
    damages = _damages(store, good)
    for number, content in damages.items():
        obstore.put(bucket, names[number], content)
    assert store.reads(list(range(8))) == [number not in damages for number in range(8)]
    assert (store.into[list(damages)] == 0xEE).all(), "nothing unproven reaches the engine's memory"
    assert not store.tier.ailment, "the store answered: nothing is wrong with it"
    found = store.do(Way.FIND, list(range(8)))
    assert found.ok.tolist() == [number not in damages for number in range(8)]
    store.write(list(range(8)))
    assert store.reads(list(range(8))) == [True] * 8, "what was known to be bad is written anew"


def test_wrong_credentials_are_said_and_fail_at_once(open_store: Open) -> None:
    wrong = {**remote.CREDENTIALS, "AWS_SECRET_ACCESS_KEY": "not-the-secret-at-all"}
    store = open_store(s3_servers.server("rclone").endpoint, credentials=wrong, is_well=False)
    store.wait_ailing("403")
    assert "not-the-secret" not in store.tier.ailment
    store.send(Way.WRITE, [0])
    (result,) = store.tier.poll()
    assert not result.ok.any()


def test_a_missing_bucket_is_said_and_used_once_it_is_there(
    open_store: Open, own_server: s3_servers.S3Server
) -> None:
    store = open_store(own_server.endpoint, bucket="not-here-yet", is_well=False)
    store.wait_ailing("NoSuchBucket")
    own_server.make_bucket("not-here-yet")
    store.wait_healed()
    store.write([0])
    assert store.reads([0]) == [True]


def test_a_server_killed_and_started_again(
    open_store: Open, own_server: s3_servers.S3Server
) -> None:
    store = open_store(own_server.endpoint)
    store.write([0, 1])
    own_server.kill()
    assert store.reads([0, 1]) == [False, False]
    store.wait_ailing("Connection refused")
    store.send(Way.READ, [0])
    (result,) = store.tier.poll()
    assert not result.ok.any(), "nobody waits for a store that is away"
    own_server.start()
    store.wait_healed()
    assert store.reads([0, 1]) == [True, True]


def _ahead(hours: float) -> Callable[[], datetime]:
    return lambda: datetime.now(timezone.utc) + timedelta(hours=hours)


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_gone_wrong_costs_one_batch_and_heals_with_it(
    hours: float, open_store: Open, door: s3_servers.Door
) -> None:
    """The server's or ours: a request whose time is not the server's is refused."""
    door.clock = _ahead(0)
    store = open_store(door.endpoint)
    store.write([0, 1])
    door.clock = _ahead(hours)
    store.into[:] = 0xEE
    assert not store.do(Way.READ, [0, 1], within=20.0).ok.any()
    store.wait_ailing("RequestTimeTooSkewed")
    store.send(Way.FIND, [0])
    (result,) = store.tier.poll()
    assert not result.ok.any(), "nobody waits for a store that refuses us"
    assert (store.into == 0xEE).all()
    door.clock = _ahead(0)
    store.wait_healed()
    assert store.reads([0, 1]) == [True, True]


@pytest.fixture
def serve_tls(tmp_path: Path) -> Iterator[Callable[..., s3_servers.S3Server]]:
    servers: list[s3_servers.S3Server] = []

    def begin(**how) -> s3_servers.S3Server:
        made = make_certificate(tmp_path / f"tls{len(servers)}", **how)
        servers.append(s3_servers.S3Server("rclone", certificate=made))
        servers[-1].start()
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_a_store_behind_tls_with_an_authority_of_ones_own(
    open_store: Open, serve_tls: Callable[..., s3_servers.S3Server]
) -> None:
    server = serve_tls()
    assert server.certificate is not None
    trusting = {**remote.CREDENTIALS, "AWS_CA_BUNDLE": str(server.certificate.authority)}
    store = open_store(server.endpoint, credentials=trusting)
    assert not store.tier.ailment
    store.write([0, 1])
    assert store.reads([0, 1]) == [True, True]


@pytest.mark.parametrize(
    ("how", "is_trusted", "why"),
    [
        ({"address": "127.0.0.9"}, True, "names another server"),
        ({"hours": -1}, True, "is out of date"),
        ({}, False, "AWS_CA_BUNDLE"),
    ],
)
def test_a_wrong_certificate_is_said_and_costs_misses(
    how: dict[str, Any],
    is_trusted: bool,
    why: str,
    open_store: Open,
    serve_tls: Callable[..., s3_servers.S3Server],
) -> None:
    server = serve_tls(**how)
    assert server.certificate is not None
    bundle = {"AWS_CA_BUNDLE": str(server.certificate.authority)} if is_trusted else {}
    credentials = {**remote.CREDENTIALS, **bundle}
    store = open_store(server.endpoint, credentials=credentials, is_well=False)
    store.wait_ailing(why)
    assert "certificate" in store.tier.ailment
    store.into[:] = 0xEE
    for way in (Way.WRITE, Way.FIND, Way.READ):
        assert not store.do(way, [0, 1]).ok.any()
    assert (store.into == 0xEE).all()


def test_a_held_up_network_costs_one_deadline(open_store: Open, wire: s3_servers.Wire) -> None:
    """However much was asked for.

    Seen red where blocks that waited behind those the store had counted as answers of its.
    """
    store = open_store(wire.endpoint)
    store.write([0, 1])
    for way, numbers in ((Way.FIND, list(range(1000))), (Way.READ, [0, 1])):
        wire.is_held = True
        store.into[:] = 0xEE
        reasons = set(store.lose(way, numbers).reasons.values())
        assert any("in time" in reason for reason in reasons)
        assert way is Way.READ or len(reasons) == 2, "some were asked for, some waited behind them"
        store.send(Way.FIND, [0])
        assert len(store.tier.poll()) == 1, "the second pays nothing"
        wire.is_held = False
        if way is Way.FIND:
            store.wait_healed()
    store.wait_healed()
    assert (store.into == 0xEE).all(), "what came late touched nothing"
    assert store.reads([0, 1]) == [True, True]


def test_lines_cut_in_the_middle_of_answers(open_store: Open, wire: s3_servers.Wire) -> None:
    store = open_store(wire.endpoint)
    store.write([0, 1, 2])
    wire.cut_after = SIZE // 2
    wire.cut()
    store.into[:] = 0xEE
    result = store.do(Way.READ, [0, 1, 2], within=3.0)
    assert not result.ok.any()
    assert (store.into == 0xEE).all()
    wire.cut_after = None
    store.wait_healed()
    assert store.reads([0, 1, 2]) == [True] * 3


def test_a_killed_process_is_started_again(open_store: Open, door: s3_servers.Door) -> None:
    store = open_store(door.endpoint)
    store.write([0, 1])
    _hang(door)
    store.into[:] = 0xEE
    store.send(Way.READ, [0])
    store.wait(lambda: door.num_requests > 4)
    os.kill(_pid(store.tier), signal.SIGKILL)
    (result,) = store.tier.drain(LONG)
    assert not result.ok.any()
    assert "process" in store.tier.ailment
    door.fault = None
    store.wait_healed()
    assert (store.into == 0xEE).all()
    assert store.reads([0, 1]) == [True, True]


def test_a_process_that_hangs_is_ended_and_touches_nothing_later(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "GRACE_SECONDS", 0.1)
    store = open_store(s3_servers.server("rclone").endpoint)
    store.write([0, 1])
    stopped = _pid(store.tier)
    os.kill(stopped, signal.SIGSTOP)
    store.into[:] = 0xEE
    result = store.do(Way.READ, [0, 1], within=0.2)
    assert not result.ok.any()
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    assert (store.into == 0xEE).all()
    store.wait_healed()
    assert store.reads([0, 1]) == [True, True]


def _hang(door: s3_servers.Door) -> None:
    def fault(way: Way, at: object) -> None:
        while door.fault is not None:
            time.sleep(0.01)

    door.fault = fault


def _pid(tier: RemoteTier) -> int:
    assert tier._child is not None
    return tier._child.pid
