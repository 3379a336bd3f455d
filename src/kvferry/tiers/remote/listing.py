"""Lists kvferry's objects in a bucket, with owner and age; removes them by hand or by age."""

from __future__ import annotations

import logging
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
    r"kvferry-\d+/([0-9a-f]{64})/r(\d+)of(\d+)/([0-9a-f]{16})/(?:[0-9a-f]{2}/)?([0-9a-z]+)"
)
PROBE, MOST_LABEL = b"kvferry was here\n", 1024
"""The first bytes of a probe, before the label of its model; and the most bytes of both."""
_PAGE = 1000
_TURNS = "kvferry-turns"
_TURNS_PER_TTL, _SHORTEST_TURN, _LONGEST_TURN = 8, 60.0, 3600.0


@dataclass(frozen=True)
class ObjectListed:
    """An object of kvferry's in a listing. ``name`` is "probe" for the one beside the blocks."""

    path: str
    num_bytes: int
    modified: datetime
    namespace: str
    rank: int
    num_ranks: int
    generation: str
    name: str


def list_ours(store: Any, prefix: str) -> Iterator[list[ObjectListed]]:
    """Yield all objects of kvferry's below a prefix, a page at a time; skip all others."""
    top = obstore.list_with_delimiter(store, prefix.rstrip("/") or None)
    for folder in top["common_prefixes"]:
        if not re.fullmatch(r"kvferry-\d+", folder[len(prefix) :].strip("/")):
            continue
        for page in obstore.list(store, prefix=folder, chunk_size=_PAGE):
            ours = []
            for each in page:
                if match := _GROUP.fullmatch(each["path"][len(prefix) :]):
                    what = each["path"], each["size"], each["last_modified"]
                    namespace, rank, num_ranks, *name = match.groups()
                    ours.append(ObjectListed(*what, namespace, int(rank), int(num_ranks), *name))
            yield ours


def label_in(store: Any, path: str) -> str:
    """Return the model's label in a probe, as its writer gave it; empty if it cannot be read."""
    with suppress(Exception):  # the label is for people alone
        begin = bytes(next(iter(obstore.get(store, path).stream(min_chunk_size=MOST_LABEL)), b""))
        if begin.startswith(PROBE):
            label = begin[:MOST_LABEL].removeprefix(PROBE).rstrip(b"\0")
            return label.decode(errors="replace")
    return ""


def remove(store: Any, paths: list[str]) -> None:
    """Remove objects. A server that reads one of them meanwhile gets a miss."""
    try:
        obstore.delete(store, paths)
    except FileNotFoundError:  # another server has removed one: the rest may still be there
        for path in paths:
            with suppress(FileNotFoundError):
                obstore.delete(store, path)


class Expiry:
    """Removes objects written more than ``ttl`` seconds ago. Owns this server's turns at it.

    Time is cut into turns, and each turn has an object. The server that creates it scans the
    bucket, and no other does until the next turn. That object also tells the store's time. If the
    store ignores the condition, the last server that wrote the object has the turn.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        ttl: float,
        log: Log,
        *,
        settle: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``settle``: seconds to wait until the last server has written the turn's object."""
        self._store = store
        self._prefix = prefix
        self._ttl = timedelta(seconds=ttl)
        self._log = log
        self._settle = settle
        self._clock = clock
        self.turn_seconds = min(max(ttl / _TURNS_PER_TTL, _SHORTEST_TURN), _LONGEST_TURN)

    def run(self) -> None:
        while True:
            try:
                self.take_turn()
            except Exception as error:
                self._log(logging.WARNING, f"old blocks are not removed: {reason_of(error)}")
            time.sleep(self.turn_seconds - self._clock() % self.turn_seconds)

    def take_turn(self) -> int:
        """Remove expired objects, if this turn is ours; return their number."""
        turn = int(self._clock() // self.turn_seconds)
        name = f"{self._prefix}{_TURNS}/{turn:012d}"
        now = self._claim(name)
        if now is None:
            return 0
        num_removed = 0
        for page in list_ours(self._store, self._prefix):
            if self._clock() >= (turn + 1) * self.turn_seconds:
                break  # the next turn removes the rest
            old = [each.path for each in page if each.modified < now - self._ttl]
            remove(self._store, old)
            num_removed += len(old)
        for past in obstore.list(self._store, prefix=f"{self._prefix}{_TURNS}"):
            remove(self._store, [each["path"] for each in past if each["path"] < name])
        if num_removed:
            self._log(logging.INFO, f"{num_removed} objects older than remote_ttl were removed")
        return num_removed

    def _claim(self, name: str) -> datetime | None:
        """Return the store's time if the turn of this name is ours, else None."""
        mine = secrets.token_bytes(16)
        with suppress(FileNotFoundError):
            obstore.head(self._store, name)
            return None
        try:
            obstore.put(self._store, name, mine, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return None
        except (exceptions.NotSupportedError, NotImplementedError):
            obstore.put(self._store, name, mine, use_multipart=False)
        time.sleep(self._settle)
        got = obstore.get(self._store, name)
        return got.meta["last_modified"] if bytes(got.bytes()) == mine else None
