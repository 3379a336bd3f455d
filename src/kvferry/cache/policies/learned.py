"""File format for the numbers that an eviction policy has learned, to survive a restart.

::

    magic and version, digest of the rest, numbers as 32 bit floats
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

_MAGIC = b"kvferry learned\x01"
_DIGEST_BYTES = 16


@runtime_checkable
class Learns(Protocol):
    """An eviction policy that learns numbers which the next process can use."""

    @property
    def learned(self) -> tuple[npt.NDArray[np.float64], ...]:
        """The learned arrays; :func:`unpack` writes into them."""


def pack(policy: object) -> bytes:
    """Return the file's bytes for what a policy has learned; empty if it does not learn."""
    if not isinstance(policy, Learns):
        return b""
    numbers = b"".join(array.astype("<f4").tobytes() for array in policy.learned)
    return _MAGIC + _digest(numbers) + numbers


def unpack(policy: object, found: bytes) -> bool:
    """Fill a policy's arrays from packed bytes; False, and no change, if they are bad."""
    if not isinstance(policy, Learns):
        return False
    start = len(_MAGIC) + _DIGEST_BYTES
    numbers, arrays = found[start:], policy.learned
    size = sum(array.size for array in arrays)
    is_whole = found[:start] == _MAGIC + _digest(numbers) and len(numbers) == 4 * size
    values = np.frombuffer(numbers, "<f4").astype(np.float64) if is_whole else np.array([np.nan])
    if not np.isfinite(values).all():
        return False
    for array in arrays:
        array[:] = values[: array.size]
        values = values[array.size :]
    return True


def _digest(numbers: bytes) -> bytes:
    return blake2b(numbers, digest_size=_DIGEST_BYTES).digest()
