"""What lies in a bucket, by whose it is and how old; and its removal by age."""

from __future__ import annotations

import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions

from kvferry.tiers.remote.client import Log
from kvferry.tiers.remote.stores import reason_of

_GROUP = re.compile(
    r"kvferry-(\d+)/([0-9a-f]{64})/r(\d+)of(\d+)/([0-9a-f]{16})/(?:[0-9a-f]{2}/)?([0-9a-z]+)"
)
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
    namespace: str
    rank: int
    num_ranks: int
    generation: str
    name: str


def list_ours(store: Any, prefix: str) -> Iterator[list[ObjectListed]]:
    """All objects of kvferry's below a prefix, a page at a time; what is not ours is left out."""
    top = obstore.list_with_delimiter(store, prefix.rstrip("/") or None)
    for folder in top["common_prefixes"]:
        if not re.fullmatch(r"kvferry-\d+", folder[len(prefix) :].strip("/")):
            continue
        for page in obstore.list(store, prefix=folder, chunk_size=_PAGE):
            found = ((each, _GROUP.fullmatch(each["path"][len(prefix) :])) for each in page)
            yield [
                ObjectListed(
                    each["path"],
                    each["size"],
                    each["last_modified"],
                    match[2],
                    int(match[3]),
                    int(match[4]),
                    match[5],
                    match[6],
                )
                for each, match in found
                if match
            ]


def read_small(store: Any, path: str) -> bytes:
    """A small object; no more of it is read than it may have."""
    got = obstore.get(store, path)
    content = b""
    if got.meta["size"] <= MOST_PROBE:
        for piece in got.stream(min_chunk_size=MOST_PROBE):
            content += bytes(piece)
            if len(content) > MOST_PROBE:
                break
    return content if len(content) == got.meta["size"] else b""


def label_in(store: Any, path: str) -> str:
    """What the writer of a small object beside its blocks calls its model."""
    with suppress(Exception):  # it is for people alone
        said = read_small(store, path)
        if said.startswith(PROBE):
            return said.removeprefix(PROBE).decode(errors="replace")
    return ""


def remove(store: Any, paths: list[str]) -> None:
    """Remove some objects. A server that reads one of them meanwhile misses it."""
    try:
        obstore.delete(store, paths)
    except FileNotFoundError:  # another server has removed one: the rest may still be there
        for path in paths:
            with suppress(FileNotFoundError):
                obstore.delete(store, path)


class Expiry:
    """Removes what is older than ``ttl``. Owns this server's turns at it.

    Time is cut into turns, and each turn has an object. The server that creates it looks through
    the bucket, and no other does until the next turn. By that object the store also tells the time.
    Where the store ignores the condition, the last server that wrote the object has the turn.
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

    def run(self) -> None:
        """Take turns for ever."""
        while True:
            try:
                self.take_turn()
            except Exception as error:
                self._log(logging.WARNING, f"old blocks are not removed: {reason_of(error)}")
            left = self.turn_seconds - self._clock() % self.turn_seconds
            time.sleep(left + 0.1 * self.turn_seconds * random.random())

    def take_turn(self) -> int:
        """Remove what is too old, if this turn is ours; how many objects."""
        turn = int(self._clock() // self.turn_seconds)
        name = f"{self._prefix}{_TURNS}/{turn:012d}"
        now = self._claim(name)
        if now is None:
            return 0
        num_removed = 0
        alive = set[tuple[object, ...]]()
        probes = dict[str, tuple[object, ...]]()  # they say whose the blocks beside them are
        for page in list_ours(self._store, self._prefix):
            if self._clock() >= (turn + 1) * self.turn_seconds:
                break  # the rest is the next turn's
            old: list[str] = []
            for each in page:
                beside = (each.namespace, each.rank, each.num_ranks, each.generation)
                if each.modified >= now - self._ttl:
                    alive.add(beside)
                elif each.name == "probe":
                    probes[each.path] = beside
                else:
                    old.append(each.path)
            remove(self._store, old)
            num_removed += len(old)
        else:
            old = [path for path, beside in probes.items() if beside not in alive]
            remove(self._store, old)
            num_removed += len(old)
        for past in obstore.list(self._store, prefix=f"{self._prefix}{_TURNS}"):
            remove(self._store, [each["path"] for each in past if each["path"] < name])
        if num_removed:
            self._log(logging.INFO, f"{num_removed} objects older than remote_ttl were removed")
        return num_removed

    def _claim(self, name: str) -> datetime | None:
        """The store's time, if the turn of this name is ours."""
        mine = secrets.token_bytes(16)
        try:
            obstore.head(self._store, name)
            return None
        except FileNotFoundError:
            pass
        try:
            obstore.put(self._store, name, mine, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return None
        except (exceptions.NotSupportedError, NotImplementedError):
            obstore.put(self._store, name, mine, use_multipart=False)
        time.sleep(self._settle)
        if read_small(self._store, name) != mine:
            return None
        return obstore.head(self._store, name)["last_modified"]
