"""Tiers in shared stores, as tests open them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import obstore
from obstore.store import AzureStore, LocalStore, S3Store
from tests.fakes import s3_servers
from tests.fakes.crafted_keys import keys

from kvferry.config import Config
from kvferry.core.quantities import KiB
from kvferry.tiers.contract import Batch, BatchId, Result, TierSetup, Way
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.tier import RemoteTier, open_remote
from kvferry.types import Rank, TierName

SIZE = 4096
MOONCAKE_SIZE = 64 * KiB
LONG = 60.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": s3_servers.ACCESS,
    "AWS_SECRET_ACCESS_KEY": s3_servers.SECRET,
    "AWS_REGION": "us-east-1",
    "GOOGLE_BEARER_TOKEN": "test",
    "AZURE_STORAGE_ACCOUNT": s3_servers.ACCOUNT,
    "AZURE_STORAGE_KEY": s3_servers.ACCOUNT_KEY,
}


def environment(changes: Mapping[str, str]) -> Any:
    """These variables for as long; processes started meanwhile have them for ever."""
    return patch.dict(os.environ, changes)


def hello(address: str, objects: ObjectFormat) -> dict[str, object]:
    """What a process is told, where no factory tells it."""
    return {
        "address": address,
        "namespace": objects.namespace.hex(),
        "block_bytes": objects.block_bytes,
        "rank": objects.rank,
        "num_ranks": objects.num_ranks,
    }


def open_s3(
    endpoint: str,
    block_bytes: int,
    *,
    namespace: bytes | None = None,
    bucket: str = s3_servers.BUCKET,
    credentials: Mapping[str, str] = CREDENTIALS,
    rank: int = 0,
    num_ranks: int = 1,
    is_well: bool = True,
    scheme: str = "s3",
    address: str = "",
    **settings: Any,
) -> RemoteTier:
    """A tier in a namespace of its own, unless told which; waited for if it should be well."""
    setup = TierSetup(
        TierName("remote"),
        block_bytes,
        Rank(rank),
        num_ranks,
        options=address or f"{scheme}://{bucket}/tests?endpoint={endpoint}",
        label="a-model",
        shared_namespace=namespace or secrets.token_bytes(32),
        config=Config(**settings),
    )
    with environment(credentials):
        tier = open_remote(setup)
    end = time.monotonic() + LONG
    while is_well and tier.ailment and time.monotonic() < end:  # on a machine that is busy
        time.sleep(0.01)
        tier.poll()
    return tier


def remove(kind: str, names: Sequence[str]) -> None:
    """These objects are gone from the server, as far as they were there."""
    for name in names:
        with suppress(FileNotFoundError):
            obstore.delete(bucket(kind), f"tests/{name}")


def bucket(kind: str) -> S3Store | AzureStore | LocalStore:
    """The server's own view, past everything of ours."""
    if kind == "directory":
        return LocalStore(s3_servers.directory())
    endpoint = s3_servers.server(kind).endpoint
    if kind != "azurite":
        return bucket_at(endpoint)
    return AzureStore(
        s3_servers.BUCKET,
        endpoint=f"{endpoint}/{s3_servers.ACCOUNT}",
        account_name=s3_servers.ACCOUNT,
        account_key=s3_servers.ACCOUNT_KEY,
        client_options={"allow_http": True},
    )


def bucket_at(endpoint: str) -> S3Store:
    return S3Store(
        s3_servers.BUCKET,
        endpoint=endpoint,
        access_key_id=s3_servers.ACCESS,
        secret_access_key=s3_servers.SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )


class Store:
    """A tier, and blocks of random bytes to move through it. Block ``n`` has key ``n``."""

    def __init__(self, tier: RemoteTier, namespace: bytes) -> None:
        self.tier = tier
        size = tier.block_bytes
        self.objects = ObjectFormat(namespace, size)
        rows = np.empty((16, size), dtype=np.uint8)
        self.rows, self.into = rows[:8], rows[8:]
        self.rows[:] = np.random.default_rng().integers(0, 256, (8, size), dtype=np.uint8)
        self.into[:] = 0xEE
        self._next_id = 0

    def send(self, way: Way, numbers: list[int], within: float = LONG) -> None:
        self._next_id += 1
        memory = self.rows if way is Way.WRITE else self.into
        starts = np.array(numbers, dtype=np.int64) * memory.strides[0]
        addresses = (memory.ctypes.data + starts)[:, None]
        sizes = np.array([self.tier.block_bytes], dtype=np.int64)
        end = time.monotonic() + within
        batch = Batch(BatchId(self._next_id), way, keys(numbers), end)
        if way is not Way.FIND:
            batch = Batch(batch.id, way, batch.keys, end, addresses, sizes)
        self.tier.submit(batch)

    def do(self, way: Way, numbers: list[int], within: float = LONG) -> Result:
        self.send(way, numbers, within)
        (result,) = self.tier.drain(LONG)
        return result

    def write(self, numbers: list[int]) -> None:
        result = self.do(Way.WRITE, numbers)
        assert result.ok.all(), result.reasons

    def reads(self, numbers: list[int]) -> list[bool]:
        """Which come; those that do come right."""
        self.into[:] = 0xEE
        result = self.do(Way.READ, numbers)
        for at, number in enumerate(numbers):
            assert not result.ok[at] or (self.into[number] == self.rows[number]).all()
        return result.ok.tolist()

    def lose(self, way: Way, numbers: list[int]) -> Result:
        """Their deadline passes while the store has them, so that it is left alone from then on.

        A machine that is busy may not have asked it in so short a time: then again, with more.
        """
        for within in (0.5, 4.0, 30.0):
            result = self.do(way, numbers, within)
            assert not result.ok.any()
            if self.tier.ailment:
                return result
        raise AssertionError(f"nobody asked the store: {result.reasons}")

    def wait(self, what: Callable[[], bool]) -> None:
        give_up = time.monotonic() + LONG
        while not what():
            assert time.monotonic() < give_up, self.tier.ailment
            self.tier.poll()
            time.sleep(0.01)

    def wait_healed(self) -> None:
        """Until it can be read and written."""
        self.wait(lambda: not self.tier.ailment and not self.tier.refusal_to_write)

    def wait_ailing(self, words: str) -> None:
        """Until this is why it cannot be used: a busy machine may first only hear nothing."""
        self.wait(lambda: words in self.tier.ailment)


def open_mooncake_tier(
    place: str,
    options: str = "",
    *,
    namespace: bytes,
    environment_: Mapping[str, str],
) -> RemoteTier:
    """In a process of its own, for blocks of ``MOONCAKE_SIZE``."""
    setup = TierSetup(
        TierName("remote"),
        MOONCAKE_SIZE,
        options=f"mooncake://{place}{options}",
        shared_namespace=namespace,
    )
    with environment(environment_):
        return open_remote(setup)
