"""Blocks encrypted in a shared store: who has the key shares, all others find and forge nothing."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import obstore
import pytest
from tests.fakes import mooncake_store, remote, s3_servers
from tests.fakes.crafted_keys import key, keys
from tests.fakes.remote import SIZE, Store

from kvferry.config import REMOTE_KEY_ENV, Config
from kvferry.errors import ConfigError
from kvferry.tiers.contract import TierSetup, Way
from kvferry.tiers.remote.objects import AesSealer, ObjectFormat, open_sealer
from kvferry.tiers.remote.tier import open_remote
from kvferry.types import TierName

ALL = list(range(8))
KEY = bytes(range(100, 132))
PLAIN = ObjectFormat(bytes(range(32)), 64, rank=1, num_ranks=2)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REMOTE_KEY_ENV, raising=False)


def sealed(objects: ObjectFormat, block: bytes, number: int = 7) -> bytearray:
    sealing, stored = open_sealer(objects), bytearray(objects.object_bytes)
    sealing.plain(memoryview(stored))[:] = block
    sealing.seal(memoryview(stored), key(number))
    return stored


@pytest.mark.parametrize("ours", [PLAIN, PLAIN.with_key(KEY)], ids=["checksum", "encrypted"])
def test_a_block_proves_itself_and_any_changed_bit_does_not(ours: ObjectFormat) -> None:
    block = secrets.token_bytes(64)
    sealing, stored = open_sealer(ours), sealed(ours, block)
    assert isinstance(sealing, AesSealer) is (ours.secret is not None)
    assert bytes(sealing.unseal(memoryview(stored), key(7)) or b"") == block
    for at in range(len(stored)):
        stored[at] ^= 1
        assert sealing.unseal(memoryview(stored), key(7)) is None, f"byte {at}"
        stored[at] ^= 1
    assert sealing.unseal(memoryview(stored), key(8)) is None, "another block of ours"
    assert sealing.unseal(memoryview(stored)[:-1], key(7)) is None
    assert sealing.unseal(memoryview(b""), key(7)) is None


@pytest.mark.parametrize("secret", [None, KEY])
@pytest.mark.parametrize(
    "other",
    [
        PLAIN.with_key(bytes(32)),
        ObjectFormat(bytes(32), 64, 1, 2),
        ObjectFormat(PLAIN.namespace, 64, 0, 2),
        ObjectFormat(PLAIN.namespace, 64, 1, 3),
        ObjectFormat(PLAIN.namespace, 63, 1, 2),
    ],
)
def test_what_is_sealed_otherwise_is_neither_found_nor_opened(
    other: ObjectFormat, secret: bytes | None
) -> None:
    ours = PLAIN.with_key(secret)
    other = other if other.secret is not None else other.with_key(secret)
    stored = memoryview(sealed(other, bytes(other.block_bytes)))
    assert open_sealer(ours).unseal(stored, key(7)) is None
    if other.block_bytes == ours.block_bytes:
        assert not set(ours.names([key(7)])) & set(other.names([key(7)]))
    if secret is not None:
        assert not set(ours.names([key(7)])) & set(PLAIN.names([key(7)]))


def test_neither_bytes_nor_names_tell_what_was_asked() -> None:
    ours, block = PLAIN.with_key(KEY), b"what people asked" + bytes(47)
    first, second = sealed(ours, block), sealed(ours, block)
    assert block[:17] not in first
    assert first != second, "not even that two are alike"
    (name,) = ours.names([key(7)])
    assert key(7).hex() not in name
    assert PLAIN.namespace.hex() not in name
    assert repr(KEY) not in repr(ours)
    assert ours.secret is not None
    assert ours.secret.hex() not in repr(ours)


class Servers:
    """Servers of one store and namespace; each with a key of its own, or none."""

    def __init__(self, address: str, env: dict[str, str], close: ExitStack) -> None:
        self._address = address
        self._env = env
        self._close = close
        self.namespace = secrets.token_bytes(32)

    def open(self, key_: bytes | None = KEY) -> Store:
        env = dict(self._env)
        if key_ is not None:
            env[REMOTE_KEY_ENV] = base64.b64encode(key_).decode()
        setup = TierSetup(
            TierName("remote"),
            SIZE,
            options=self._address,
            shared_namespace=self.namespace,
        )
        with remote.environment(env):
            tier = open_remote(setup)
        self._close.callback(tier.close)
        made = Store(tier, self.namespace)
        made.wait_healed()
        return made


def _s3(kind: str, close: ExitStack) -> Servers:
    endpoint = s3_servers.server(kind).endpoint
    return Servers(f"s3://{s3_servers.BUCKET}/tests?endpoint={endpoint}", remote.CREDENTIALS, close)


def _mooncake(_: str, close: ExitStack) -> Servers:
    place = mooncake_store.shared_master().place
    return Servers(f"mooncake://{place}", mooncake_store.environment(), close)


STORES: dict[str, Callable[[str, ExitStack], Servers]] = dict.fromkeys(s3_servers.SERVERS, _s3)
if not mooncake_store.lacking():
    STORES["mooncake"] = _mooncake


@pytest.fixture(params=sorted(STORES))
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with ExitStack() as close:
        yield STORES[request.param](request.param, close)


def test_servers_with_one_key_share_and_others_find_nothing(servers: Servers) -> None:
    writer, reader = servers.open(), servers.open()
    writer.write(ALL)
    reader.rows[:] = writer.rows
    assert reader.do(Way.FIND, ALL).ok.all()
    assert reader.reads(ALL) == [True] * 8
    for wrong in (secrets.token_bytes(32), None):
        stranger = servers.open(wrong)
        assert not stranger.do(Way.FIND, ALL).ok.any()
        assert stranger.reads(ALL) == [False] * 8
        assert not stranger.tier.ailment, "a miss, not a fault"
        stranger.write([0])
    assert reader.reads(ALL) == [True] * 8, "strangers harm nobody"


def _changed(good: Sequence[bytes]) -> dict[int, bytes]:
    size = len(good[0])
    flipped, in_nonce = bytearray(good[0]), bytearray(good[1])
    flipped[size // 2] ^= 4
    in_nonce[-1] ^= 1
    return {0: bytes(flipped), 1: bytes(in_nonce), 2: good[3], 4: secrets.token_bytes(size), 5: b""}


def test_forged_objects_are_misses_and_are_replaced() -> None:
    with ExitStack() as close:
        servers = _s3("moto", close)
        store = servers.open()
        store.write(ALL)
        objects = ObjectFormat(servers.namespace, store.tier.block_bytes).with_key(KEY)
        names = [f"tests/{name}" for name in objects.names(keys(ALL))]
        bucket = remote.bucket("moto")
        good = [bytes(obstore.get(bucket, name).bytes()) for name in names]
        for number, content in enumerate(good):
            assert store.rows[number, :64].tobytes() not in content, "no plain byte is shared"
        changed = _changed(good)
        # Who has no key, but may write to the bucket, and knows everything else: a block with a
        # checksum, as long as ours.
        plain = ObjectFormat(servers.namespace, objects.object_bytes - 120)
        forged = np.zeros(plain.block_bytes, np.uint8).data
        changed[6] = bytes(forged) + plain.seal(forged, key(6))
        for number, content in changed.items():
            obstore.put(bucket, names[number], content)
        assert store.reads(ALL) == [number not in changed for number in ALL]
        assert not store.tier.ailment
        found = store.do(Way.FIND, ALL)
        assert found.ok.tolist() == [number not in changed for number in ALL]
        store.write(ALL)
        assert store.reads(ALL) == [True] * 8


def test_a_key_that_cannot_be_used_is_refused_before_anything_is_shared(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(b"short")
    setup = TierSetup(
        TierName("remote"),
        SIZE,
        options="s3://bucket",
        shared_namespace=bytes(32),
        config=Config(remote_key_file=str(file)),
    )
    with pytest.raises(ConfigError, match=r"remote_key_file: .* holds no key: give 32 random"):
        open_remote(setup)
