"""What an engine and its child processes tell each other about blocks.

Both ends are of one release and on one machine, so nothing here is kept for others to read::

    engine ──> HELLO, ORDER, CANCEL, FORGET ──> child
    engine <── READY | REFUSED, RESULT, AILS, FORGOT, SAYS <── child
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.tiers.contract import Way
from kvferry.tiers.ipc.channel import FrameKind, frame

_ORDER = struct.Struct("<qqdIIBB6x")
_RESULT = struct.Struct("<qqdII")
_REASON = struct.Struct("<II")
_SAYS = struct.Struct("<I")
_WAYS = (Way.READ, Way.WRITE, Way.FIND)

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OrderMessage:
    """A batch, or the part of it that one child carries out.

    ``places`` are the child's own, for a tier that has places. ``runs`` are for a shared store.
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
    """The result of an order: ``ok`` and ``reasons`` by position in the order."""

    id: int
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, str]
    num_bytes: int
    seconds: float


def pack_order(order: OrderMessage) -> bytes:
    """Return the frame of an order."""
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
    """Return the order in a frame's body; its arrays share the body's memory."""
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
    """Return the frame of a result. Equal reasons are sent once: most blocks share one."""
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
    """Return the result in a frame's body."""
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


def pack_number(kind: FrameKind, *numbers: int) -> bytes:
    """Return a frame whose body is one number, or some."""
    return frame(kind, struct.pack(f"<{len(numbers)}q", *numbers))


def unpack_numbers(body: bytes) -> tuple[int, ...]:
    """Return the numbers in a frame's body."""
    return struct.unpack(f"<{len(body) // 8}q", body)


def unpack_number(body: bytes) -> int:
    """Return the one number in a frame's body."""
    (number,) = unpack_numbers(body)
    return number


def pack_text(kind: FrameKind, text: str) -> bytes:
    """Return a frame whose body is text."""
    return frame(kind, text.encode(errors="replace"))


def unpack_text(body: bytes) -> str:
    """Return the text in a frame's body."""
    return body.decode(errors="replace")


def pack_says(level: int, text: str) -> bytes:
    """Return the frame of a log line; ``level`` is that of ``logging``."""
    return frame(FrameKind.SAYS, _SAYS.pack(level) + text.encode(errors="replace"))


def unpack_says(body: bytes) -> tuple[int, str]:
    """Return the level and the text of a log line."""
    return int(_SAYS.unpack_from(body)[0]), body[_SAYS.size :].decode(errors="replace")
