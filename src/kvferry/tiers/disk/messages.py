"""What an engine and its drive processes say to each other: numbers and arrays as they are.

Every frame is a head (bytes that follow, kind) and a body. Both ends are of one release and on one
machine, so nothing here is kept for others to read::

    engine ──> HELLO, ORDER, CANCEL, FORGET ──> drive
    engine <── READY | REFUSED, RESULT, AILS, FORGOT, SAYS <── drive
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.tiers.contract import Way

HEAD = struct.Struct("<IB3x")
_NUMBER = struct.Struct("<q")
_ORDER = struct.Struct("<qqdIIBB6x")
_RESULT = struct.Struct("<qqdII")
_REASON = struct.Struct("<II")
_READY = struct.Struct("<qqqq16sI")
_FORGET = struct.Struct("<qq")
_SAYS = struct.Struct("<I")
_WAYS = (Way.READ, Way.WRITE, Way.FIND)

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1  # engine: what to serve; see setup.py
    READY = 2  # drive: open, and so many blocks are still here
    REFUSED = 3  # drive: this cannot be opened, and why
    ORDER = 4  # engine: blocks to read or to write
    CANCEL = 5  # engine: nobody wants this order any more
    RESULT = 6  # drive: what became of an order
    FORGET = 7  # engine: nothing written before this may be read again
    FORGOT = 8  # drive: and that is on the medium now
    AILS = 9  # drive: why it cannot be used; empty when it can again
    SAYS = 10  # drive: a line for the log


@dataclass(frozen=True, eq=False)
class OrderMessage:
    """A part of a batch, for one drive: as ``tiers.Batch``, with the drive's own places.

    ``runs`` are for a shared store, which has no places.
    """

    id: int
    way: Way
    generation: int
    deadline: float
    places: Numbers
    keys: Words
    sizes: Numbers
    addresses: Numbers
    runs: Numbers | None = None


@dataclass(frozen=True, eq=False)
class ResultMessage:
    """What became of it: ``ok`` by position; ``reasons`` are grouped, most have one."""

    id: int
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, str]
    num_bytes: int
    seconds: float


class StoreAt(NamedTuple):
    """One store, for whoever may reach it: where it lies, and the id that was drawn for it."""

    folder: str
    store_id: bytes


@dataclass(frozen=True)
class ReadyMessage:
    """A drive is open: its places, its epoch, its file system, how many blocks it laid down."""

    store: StoreAt
    num_places: int
    epoch: int
    device: int
    num_recovered: int
    report: str


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    return HEAD.pack(len(body), kind) + body


def pack_order(order: OrderMessage) -> bytes:
    head = _ORDER.pack(
        order.id,
        order.generation,
        order.deadline,
        len(order.places),
        len(order.sizes),
        _WAYS.index(order.way),
        order.runs is not None,
    )
    arrays = [order.sizes, order.places, order.keys, order.addresses]
    arrays += [order.runs] if order.runs is not None else []
    return frame(
        FrameKind.ORDER, b"".join((head, *(np.ascontiguousarray(a).tobytes() for a in arrays)))
    )


def unpack_order(body: bytes) -> OrderMessage:
    number, generation, deadline, count, pieces, way, has_runs = _ORDER.unpack_from(body)
    at = _ORDER.size
    sizes = np.frombuffer(body, np.int64, pieces, at)
    at += sizes.nbytes
    places = np.frombuffer(body, np.int64, count, at)
    at += places.nbytes
    keys = np.frombuffer(body, np.uint64, 4 * count, at).reshape(count, 4)
    at += keys.nbytes
    addresses = np.frombuffer(body, np.int64, count * pieces, at).reshape(count, pieces)
    at += addresses.nbytes
    runs = np.frombuffer(body, np.int64, count, at) if has_runs else None
    return OrderMessage(
        number, _WAYS[way], generation, deadline, places, keys, sizes, addresses, runs
    )


def pack_result(result: ResultMessage) -> bytes:
    groups: dict[str, list[int]] = {}
    for position, reason in result.reasons.items():
        groups.setdefault(reason, []).append(position)
    parts = [
        _RESULT.pack(result.id, result.num_bytes, result.seconds, len(result.ok), len(groups)),
        result.ok.tobytes(),
    ]
    for reason, positions in groups.items():
        text = reason.encode(errors="replace")
        parts += [_REASON.pack(len(positions), len(text)), text]
        parts.append(np.array(positions, dtype=np.uint32).tobytes())
    return frame(FrameKind.RESULT, b"".join(parts))


def unpack_result(body: bytes) -> ResultMessage:
    number, num_bytes, seconds, count, groups = _RESULT.unpack_from(body)
    at = _RESULT.size
    ok = np.frombuffer(body, np.bool_, count, at).copy()
    at += count
    reasons: dict[int, str] = {}
    for _ in range(groups):
        num_positions, length = _REASON.unpack_from(body, at)
        at += _REASON.size
        text = body[at : at + length].decode(errors="replace")
        at += length
        for position in np.frombuffer(body, np.uint32, num_positions, at).tolist():
            reasons[position] = text
        at += 4 * num_positions
    return ResultMessage(number, ok, reasons, num_bytes, seconds)


def pack_number(kind: FrameKind, number: int) -> bytes:
    return frame(kind, _NUMBER.pack(number))


def unpack_number(body: bytes) -> int:
    return int(_NUMBER.unpack(body)[0])


def pack_ready(ready: ReadyMessage) -> bytes:
    folder = os.fsencode(ready.store.folder)
    numbers = (ready.num_places, ready.epoch, ready.device, ready.num_recovered)
    head = _READY.pack(*numbers, ready.store.store_id, len(folder))
    return frame(FrameKind.READY, head + folder + ready.report.encode())


def unpack_ready(body: bytes) -> ReadyMessage:
    num_places, epoch, device, num_recovered, store_id, length = _READY.unpack_from(body)
    end = _READY.size + length
    folder, report = os.fsdecode(body[_READY.size : end]), body[end:].decode()
    store = StoreAt(folder, store_id)
    return ReadyMessage(store, num_places, epoch, device, num_recovered, report)


def pack_forget(generation: int, epoch: int) -> bytes:
    return frame(FrameKind.FORGET, _FORGET.pack(generation, epoch))


def unpack_forget(body: bytes) -> tuple[int, int]:
    generation, epoch = _FORGET.unpack(body)
    return generation, epoch


def pack_text(kind: FrameKind, text: str) -> bytes:
    return frame(kind, text.encode(errors="replace"))


def unpack_text(body: bytes) -> str:
    return body.decode(errors="replace")


def pack_says(tier: int, text: str) -> bytes:
    return frame(FrameKind.SAYS, _SAYS.pack(tier) + text.encode(errors="replace"))


def unpack_says(body: bytes) -> tuple[int, str]:
    return int(_SAYS.unpack_from(body)[0]), body[_SAYS.size :].decode(errors="replace")


# ------------------------------------------------------------------------------------------------
# What a drive process is told when it starts: plain data, over the line between the two.

COMMIT_SECONDS = 0.5
"""How long a block that was written may wait for the commit that makes it durable to begin."""

NUM_THREADS, JOB_BYTES = 8, 4 << 20
"""Threads for each way, and the longest call of one. While some wait for the drive the others copy
and check: 4 x 8 MiB read 2.5 GB/s of a drive's 3.1, 8 x 4 MiB all of it; longer or more and the
buffers leave the processor's cache: 8 x 8 MiB 2.6, 16 x 2 MiB 2.0. (16 vCPU, a virtual drive,
Linux 6.18, 2026-11-16.)
"""


_BYTES = ("namespace", "family", "families", "key")


@dataclass(frozen=True)
class DriveSetup:
    """One store on one drive, and how to work on it. ``key`` is never shown."""

    path: str
    """The directory the user named; the store lies below it."""
    block_bytes: int
    size: int
    """What everything of this host under ``path`` may take."""
    pid: int
    """The engine's, whose memory the blocks are in."""
    namespace: bytes = bytes(32)
    family: bytes = b""
    families: bytes = b""
    """Of all engines of this server here, one after the other; empty: there is one."""
    label: str = ""
    rank: int = 0
    num_ranks: int = 1
    num_ranks_here: int = 1
    stripe: int = 0
    num_stripes: int = 1
    keep_free: int = 0
    for_others: float = 0.0
    key: bytes | None = field(default=None, repr=False)
    direct: bool = True
    deadline: float = 10.0
    num_threads: int = NUM_THREADS
    num_write_threads: int | None = None
    """As many as read, if nobody says."""
    job_bytes: int = JOB_BYTES
    commit_seconds: float = COMMIT_SECONDS
    check_seconds: float = 1.0
    generation: int = 0
    """Orders count from here; what is found at the start belongs to it."""
    device: int | None = None
    """The file system it was on when it was first started. A directory that vanished is not made
    anew, least of all on what lies below a mount that is gone.
    """

    def pack(self) -> bytes:
        told = asdict(self)
        for name in _BYTES:
            if told[name] is not None:
                told[name] = base64.b64encode(told[name]).decode()
        return json.dumps(told).encode()

    @classmethod
    def unpack(cls, data: bytes) -> DriveSetup:
        told = json.loads(data)
        for name in _BYTES:
            if told[name] is not None:
                told[name] = base64.b64decode(told[name])
        return cls(**told)
