"""What a policy has learned, in a small file that outlives its process.

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
    """An eviction policy that learns numbers which are of use to the next process."""

    @property
    def learned(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Arrays, to be written and to be filled."""


def pack(policy: object) -> bytes:
    """Return what a policy has learned, for a file; nothing if it does not learn."""
    if not isinstance(policy, Learns):
        return b""
    numbers = b"".join(array.astype("<f4").tobytes() for array in policy.learned)
    return _MAGIC + _digest(numbers) + numbers


def unpack(policy: object, found: bytes) -> bool:
    """Give a policy what an earlier process packed; False, and no change, where that is bad."""
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
