"""What a policy has learned, in a small file that outlives its process.

::

    magic and version, digest of the rest, numbers as 32 bit floats
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

log = logging.getLogger("kvferry")

_MAGIC = b"kvferry learned\x01"
_DIGEST_BYTES = 16
_MOST_BYTES = 1 << 20


@runtime_checkable
class Learns(Protocol):
    """An eviction policy that learns numbers which are of use to the next process."""

    @property
    def learned(self) -> tuple[npt.NDArray[np.float64], ...]:
        """Arrays, to be written and to be filled."""


def save(policy: object, path: Path) -> None:
    """Write what a policy has learned, if it learns; a fault is a line in the log."""
    if not isinstance(policy, Learns):
        return
    numbers = b"".join(array.astype("<f4").tobytes() for array in policy.learned)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC + _digest(numbers) + numbers)
        new.replace(path)
    except OSError as error:
        log.warning("What the eviction policy learned was not saved to %s: %s", path, error)
        new.unlink(missing_ok=True)


def restore(policy: object, path: Path) -> bool:
    """Give a policy what an earlier process saved; False where there is nothing, or it is bad."""
    if not isinstance(policy, Learns):
        return False
    try:
        with path.open("rb") as file:
            found = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("What the eviction policy learned before cannot be read: %s", error)
        return False
    start = len(_MAGIC) + _DIGEST_BYTES
    numbers, arrays = found[start:], policy.learned
    size = sum(array.size for array in arrays)
    is_whole = found[:start] == _MAGIC + _digest(numbers) and len(numbers) == 4 * size
    values = np.frombuffer(numbers, "<f4").astype(np.float64) if is_whole else np.array([np.nan])
    if not np.isfinite(values).all():
        log.warning("%s is damaged or of another version: the eviction policy learns anew", path)
        return False
    for array in arrays:
        array[:] = values[: array.size]
        values = values[array.size :]
    return True


def _digest(numbers: bytes) -> bytes:
    return blake2b(numbers, digest_size=_DIGEST_BYTES).digest()
