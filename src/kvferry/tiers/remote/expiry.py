"""What lies in a bucket, by whose it is and how old; and its removal by age."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions

from kvferry.tiers.remote.client import Log
from kvferry.tiers.remote.stores import read_object, reason_of

_GROUP = re.compile(r"kvferry-(\d+)/([0-9a-f]{64})/r(\d+)of(\d+)/([0-9a-f]{16})/([0-9a-z]+)")
_TURNS = "kvferry-turns"
PROBE, MOST_PROBE = b"kvferry was here\n", 1024
"""What begins the small object beside the blocks. The rest of it says whose they are."""
_PAGE = 1000
_PARTS = 8
_SHORTEST, _LONGEST = 60.0, 3600.0
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class ObjectListed:
    """An object of ours, as a listing has it. ``name`` is "probe" for the one beside the blocks."""

    path: str
    num_bytes: int
    modified: datetime
    format: int
    namespace: str
    rank: int
    num_ranks: int
    generation: int
    name: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


async def list_ours(store: Any, prefix: str) -> AsyncIterator[list[ObjectListed]]:
    """All objects of kvferry's below a prefix, a page at a time; what is not ours is left out."""
    top = await obstore.list_with_delimiter_async(store, prefix.rstrip("/") or None)
    for folder in top["common_prefixes"]:
        if not re.fullmatch(r"kvferry-\d+", folder[len(prefix) :].strip("/")):
            continue
        async for page in obstore.list(store, prefix=folder, chunk_size=_PAGE):
            found = ((each, _GROUP.fullmatch(each["path"][len(prefix) :])) for each in page)
            yield [
                ObjectListed(
                    each["path"],
                    each["size"],
                    each["last_modified"],
                    int(match[1]),
                    match[2],
                    int(match[3]),
                    int(match[4]),
                    int(match[5], 16),
                    match[6],
                )
                for each, match in found
                if match
            ]


async def label_in(store: Any, path: str) -> str:
    """What the writer of a small object beside its blocks calls its model."""
    try:
        said = bytes(await read_object(store, path, range(MOST_PROBE + 1)))
    except Exception:  # it is for people alone
        return ""
    return said.removeprefix(PROBE).decode(errors="replace") if said.startswith(PROBE) else ""


async def remove(store: Any, paths: list[str]) -> None:
    """Remove some objects. A server that reads one of them meanwhile misses it."""
    if paths:
        await obstore.delete_async(store, paths)


class Expiry:
    """Removes what is older than ``ttl``. Owns this server's turns at it.

    Time is cut into turns, and each turn has an object. Who creates it looks through the bucket,
    and no other server does until the next turn. By that object the store also says what time it
    is. Where the store ignores the condition, the last who wrote the object has the turn.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        ttl: float,
        log: Log,
        *,
        settle: float = _SETTLE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._ttl = timedelta(seconds=ttl)
        self._log = log
        self._settle = settle
        self._clock = clock
        self.turn_seconds = min(max(ttl / _PARTS, _SHORTEST), _LONGEST)

    async def run(self) -> None:
        """Take turns for ever."""
        while True:
            try:
                await asyncio.wait_for(self.take_turn(), self.turn_seconds)
            except asyncio.TimeoutError:
                pass  # the rest is the next turn's
            except Exception as error:
                self._log(logging.WARNING, f"old blocks are not removed: {reason_of(error)}")
            left = self.turn_seconds - self._clock() % self.turn_seconds
            await asyncio.sleep(left + 0.1 * self.turn_seconds * secrets.randbelow(1000) / 1000)

    async def take_turn(self) -> int:
        """Remove what is too old, if this turn is ours; how many objects."""
        name = f"{self._prefix}{_TURNS}/{int(self._clock() // self.turn_seconds):012d}"
        now = await self._claim(name)
        return await self._remove_before(now - self._ttl, name) if now is not None else 0

    async def _claim(self, name: str) -> datetime | None:
        """The store's time, if the turn of this name is ours."""
        mine = secrets.token_bytes(16)
        try:
            await obstore.head_async(self._store, name)
            return None
        except FileNotFoundError:
            pass
        try:
            await obstore.put_async(self._store, name, mine, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return None
        except (exceptions.NotSupportedError, NotImplementedError):
            await obstore.put_async(self._store, name, mine, use_multipart=False)
        await asyncio.sleep(self._settle)
        if await read_object(self._store, name, range(len(mine), len(mine) + 1)) != mine:
            return None
        return (await obstore.head_async(self._store, name))["last_modified"]

    async def _remove_before(self, end: datetime, turn: str) -> int:
        num_removed, alive = 0, ""
        async for page in list_ours(self._store, self._prefix):
            old: list[str] = []
            for each in page:
                if each.modified >= end:
                    alive = each.folder
                elif each.name != "probe" or each.folder != alive:  # it says whose the others are
                    old.append(each.path)
            await remove(self._store, old)
            num_removed += len(old)
        async for page in obstore.list(self._store, prefix=f"{self._prefix}{_TURNS}"):
            past = [each["path"] for each in page if each["path"] < turn]
            await remove(self._store, past)
        if num_removed:
            self._log(logging.INFO, f"{num_removed} objects older than remote_ttl were removed")
        return num_removed
