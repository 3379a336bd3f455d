"""The client of a bucket: an object per block, many requests in flight.

It needs no rule of what a server does with an existing name: an object is verified when it is read,
and a server that overwrites one writes the same block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import obstore

from kvferry.settings.tiers import FILES, RemoteAddress
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault, Fetched, Foreign, Log, Staging, Unavailable
from kvferry.tiers.remote.listing import MOST_LABEL, PROBE, Expiry, remove
from kvferry.tiers.remote.stores import (
    REQUEST_SECONDS,
    WrongSizeError,
    open_bucket,
    read_object,
    reason_of,
)

T = TypeVar("T")

_CALLS, _MOST_CALLS, FIND_CALLS = 32, 64, 128
_ENOUGH_BYTES, _MOST_BYTES = 32 << 20, 256 << 20
"""Bytes in flight per direction: enough for a store some 20 ms away, and the maximum."""

_SPARE_MEMORY = 512 << 20
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")


class BucketClient:
    """Reads and writes objects of one bucket. Owns the connections.

    The HTTP library retries requests that fail for a moment, with backoff and jitter, until the
    batch's deadline.
    """

    def __init__(
        self,
        address: RemoteAddress,
        object_bytes: int,
        folder: str,
        env: Mapping[str, str],
        *,
        label: str = "",
        ttl: float | None = None,
    ) -> None:
        """``object_bytes`` is a block with its seal; ``label`` is shown by ``kvferry remote``."""
        self._ttl = ttl
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._probe_name = f"{self._prefix}{folder}/probe"
        self._label = (PROBE + label.encode())[:MOST_LABEL]
        self._is_folder = address.kind == FILES
        self._object_bytes = object_bytes
        # Smaller objects need more requests in flight.
        enough = min(max(_CALLS, _ENOUGH_BYTES // object_bytes), _MOST_CALLS)
        self.num_calls = max(4, min(enough, _MOST_BYTES // object_bytes))
        self.staging = Staging(object_bytes, 2 * self.num_calls)
        self._most_memory = 4 * self.num_calls * object_bytes + _SPARE_MEMORY
        self._store: Any = open_bucket(address, env)

    def names_per_call(self, way: Way) -> int:
        """Return the names per call. Lookups are short: all that are allowed are in flight."""
        return max(1, FIND_CALLS // self.num_calls) if way is Way.FIND else 1

    async def probe(self, way: Way) -> Fault | None:
        """Read an object as large as a block, or write it and read it back.

        A small one may pass where no block does: past a network's largest packet, for example.
        """
        size = self._object_bytes
        if self._is_folder and not await asyncio.to_thread(os.path.isdir, f"/{self._prefix}"):
            return Fault("the directory of its address is not there")
        try:
            if way is Way.WRITE:
                content = self._label.ljust(size, b"\0")
                await self._put(self._probe_name, content)
            got = await read_object(self._store, self._probe_name, range(max(size, MOST_LABEL) + 1))
        except FileNotFoundError as error:
            is_bucket = way is Way.READ and not _NO_BUCKET.search(str(error))
            return None if is_bucket else Fault(reason_of(error))
        except Exception as error:  # after any error the store cannot be used
            return Fault(reason_of(error))
        is_wrong = way is Way.WRITE and got != content
        return Fault("what it was given it does not give back") if is_wrong else None

    def _path(self, name: str) -> str:
        """Return an object's path; a directory spreads objects over 256 folders."""
        if self._is_folder:
            folder, _, key = name.rpartition("/")
            name = f"{folder}/{key[:2]}/{key}"
        return self._prefix + name

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        async def find_one(name: str) -> None:
            there = await obstore.head_async(self._store, self._path(name))
            if there["size"] != size:
                raise WrongSizeError(there["size"])

        return list(await asyncio.gather(*(_answered(find_one(name)) for name in names)))

    async def get(self, names: Sequence[str], size: int) -> list[Fetched]:
        fits = range(size, size + 1)
        calls = (read_object(self._store, self._path(name), fits) for name in names)
        return list(await asyncio.gather(*map(_answered, calls)))

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        try:
            calls = map(self._put, map(self._path, names), objects)
            ends = await asyncio.gather(*(_answered(call, is_write=True) for call in calls))
        except asyncio.CancelledError:
            # The cancelled request may still read the objects, until its own timeout.
            loop = asyncio.get_running_loop()
            loop.call_later(REQUEST_SECONDS, self.staging.give_back, *objects)
            raise
        self.staging.give_back(*objects)
        return list(ends)

    async def _put(self, path: str, stored: Any) -> None:
        await obstore.put_async(self._store, path, stored, mode="overwrite", use_multipart=False)

    async def forget(self, folder: str) -> None:
        def remove_all() -> None:
            for page in obstore.list(self._store, prefix=self._prefix + folder):
                remove(self._store, [each["path"] for each in page])

        await asyncio.to_thread(remove_all)

    async def run_background(self, log: Log) -> None:
        """Remove objects older than ``ttl``, and end this process before a reply fills the memory.

        The HTTP library reads errors and listings to their end, whatever a server sends.
        """
        if self._ttl is not None:
            expiry = Expiry(self._store, self._prefix, self._ttl, log)
            threading.Thread(target=expiry.run, name="kvferry-expiry", daemon=True).start()
        most = _private_bytes() + self._most_memory
        while _private_bytes() < most:
            await asyncio.sleep(0.02)
        log(logging.ERROR, "the store's replies take too much memory: its process is started anew")
        os._exit(1)

    def close(self) -> None:
        """Do nothing: connections end with the process."""


async def _answered(
    call: Coroutine[Any, Any, T], *, is_write: bool = False
) -> T | Unavailable | Fault:
    try:
        return await call
    except WrongSizeError as error:
        return Foreign(str(error))
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError) and not is_write  # else: missing bucket
        return Unavailable() if is_missing else Fault(reason_of(error))


def _private_bytes() -> int:
    """Return the memory of this process alone: not the staging, and not the engine's."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
