"""What lies in a bucket, by whose it is and how old; and its removal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import obstore

_GROUP = re.compile(
    r"kvferry-(\d+)/([0-9a-f]{64})/r(\d+)of(\d+)/([0-9a-f]{16})/(?:[0-9a-f]{2}/)?([0-9a-z]+)"
)
PROBE, MOST_LABEL = b"kvferry was here\n", 1024
"""What begins the probe, the object beside the blocks, before the name of their model."""
_PAGE = 1000


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


def label_in(store: Any, path: str) -> str:
    """What the writer of a probe calls its model."""
    with suppress(Exception):  # it is for people alone
        begin = bytes(next(iter(obstore.get(store, path).stream(min_chunk_size=MOST_LABEL)), b""))
        if begin.startswith(PROBE):
            label = begin[:MOST_LABEL].removeprefix(PROBE).rstrip(b"\0")
            return label.decode(errors="replace")
    return ""


def remove(store: Any, paths: list[str]) -> None:
    """Remove some objects. A server that reads one of them meanwhile misses it."""
    try:
        obstore.delete(store, paths)
    except FileNotFoundError:  # another server has removed one: the rest may still be there
        for path in paths:
            with suppress(FileNotFoundError):
                obstore.delete(store, path)
