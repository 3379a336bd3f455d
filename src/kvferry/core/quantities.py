"""Parse and format sizes, times, shares and factory paths; check integers from callers."""

from __future__ import annotations

import difflib
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from importlib import import_module
from numbers import Integral
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, InputError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_BINARY_UNITS = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_TIME_UNITS = {
    "": Decimal(1),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
# ASCII only: lower() turns some letters of other scripts, such as the Kelvin sign, into units.
_QUANTITY = re.compile(
    r"\s*([+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-z]{0,10})\s*", re.IGNORECASE | re.ASCII
)
_COUNT = re.compile(r"\s*[+-]?[0-9]{1,30}\s*", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,20})?)\s*(%?)", re.ASCII)
_MOST_INT64 = _MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 1e9
_LEAST_PLAUSIBLE_MIB = 4096  # a smaller number without a unit more likely means GiB


def parse_size(
    value: object, *, name: str = "size", minimum: int = 1, needs_unit: bool = False
) -> int:
    """Return bytes from an int or from "64GiB" (powers of 1024), "1.5 GB" (powers of 1000), "4096".

    A fraction of a byte is dropped. ConfigError for less than ``minimum``, and for units that may
    mean either power ("64G"). With ``needs_unit`` also for a bare number below 1 MiB, which is
    hardly ever meant as bytes.
    """
    unit = ""
    if isinstance(value, str):
        number, unit = _quantity(name, value, "a size such as 64GiB or 1.5 GB")
        if unit not in _SIZE_UNITS:
            hint = (
                f"; write {unit.upper()}iB or {unit.upper()}B" if f"{unit}ib" in _SIZE_UNITS else ""
            )
            raise ConfigError(
                f"{name}: unknown unit in {quoted(value)}{hint}; units: B, kB, KiB, MB, ..."
            )
        size = math.floor(number * _SIZE_UNITS[unit])
    else:
        size = _whole(name, value, "a number of bytes or a size such as 64GiB")
    size = _between(name, value, size, minimum, _MOST_BYTES, "bytes")
    if needs_unit and not unit and 0 < size < MiB:
        meant = f"{str(value).strip()}{'GiB' if size < _LEAST_PLAUSIBLE_MIB else 'MiB'}"
        raise ConfigError(
            f"{name}: {quoted(value)} has no unit, so it would be {size} bytes; did you mean "
            f"{meant}? For bytes write {size}B"
        )
    return size


def parse_seconds(value: object, *, name: str = "time", may_be_zero: bool = False) -> float:
    """Return seconds from a number or from "30s", "500ms", "2min" or "2m", "1h", "7d"."""
    seconds: float
    if isinstance(value, str):
        number, unit = _quantity(name, value, "a time such as 30s or 500ms")
        if unit not in _TIME_UNITS:
            raise ConfigError(
                f"{name}: unknown unit in {quoted(value)}; units: us, ms, s, min, h, d"
            )
        seconds = float(number * _TIME_UNITS[unit])
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}: expected seconds or a time such as 30s, got {shown(value)}")
    else:
        seconds = float(value) if abs(value) < _MOST_BYTES else math.inf  # a huge int overflows
    if not 0 <= seconds <= _MOST_SECONDS or not (seconds or may_be_zero):
        least = "not negative" if may_be_zero else "above zero"
        raise ConfigError(
            f"{name}: must be {least} and at most {_MOST_SECONDS:.0f} seconds, got {shown(value)}"
        )
    return seconds


def parse_count(
    value: object, *, name: str = "count", minimum: int = 1, maximum: int = _MOST_BYTES
) -> int:
    """Return a whole number from ``minimum`` to ``maximum``, from an int or from its digits."""
    if isinstance(value, str):
        if not _COUNT.fullmatch(value):
            raise ConfigError(f"{name}: expected a whole number, got {quoted(value)}")
        count = int(value)
    else:
        count = _whole(name, value, "a whole number")
    return _between(name, value, count, minimum, maximum, "")


def parse_share(value: object, *, name: str = "share") -> float:
    """Return a share, 0 to 1, from "25%", 0.25 or "0.25"."""
    text = value.strip() if isinstance(value, str) else ""
    match = _SHARE.fullmatch(text)
    share = math.nan
    if match is not None:
        share = float(match[1]) / (100.0 if match[2] else 1.0)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value) if abs(value) <= 1 else math.inf
    if not 0 <= share <= 1:
        raise ConfigError(
            f"{name}: expected a share such as 25% or 0.25, at most 100%, got {shown(value)}"
        )
    return share


def show_share(share: float) -> str:
    """Return a share as text that :func:`parse_share` reads."""
    return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"


def format_size(size: int) -> str:
    """Return a size in the largest unit that divides it; :func:`parse_size` reads it exactly."""
    for unit, factor in _BINARY_UNITS:
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def rounded_size(size: int) -> str:
    """Return a size for people, with one decimal, in the largest unit that fits: 63.9GiB."""
    for unit, factor in _BINARY_UNITS:
        if size >= factor * (1 - 0.05 / 1024):  # so that it is 1GiB, not 1024MiB
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return f"{size}B"


def shown(value: object) -> str:
    """Return a value and its type, for an error message."""
    return f"{quoted(value)} ({type(value).__name__})"


def quoted(value: object) -> str:
    """Return a value for an error message: on one line, and shortened if it is long."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits has no repr
        text = "something that cannot be shown"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def _quantity(name: str, text: str, expected: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}: expected {expected}, got {quoted(text)}")
    return Decimal(match[1]), match[2].lower()


def _whole(name: str, value: object, expected: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool):
        try:
            return operator.index(cast(int, value))
        except TypeError:
            pass
    raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")


def _between(name: str, given: object, value: int, least: int, most: int, unit: str) -> int:
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ConfigError(f"{name}: must be {bound} {unit}".rstrip() + f", got {shown(given)}")
    return value


Integers = Sequence[int] | npt.NDArray[np.integer]
"""A vector of integers: a sequence, a numpy array, or a torch tensor."""

_NO_VECTORS = (str, bytes, bytearray, memoryview, Set, Mapping)
"""Iterable types that are not vectors: their items are characters or bytes, or have no order."""


def integers(values: Integers, what: str) -> npt.NDArray[np.int64]:
    """Return ``values`` as an int64 vector, without a copy if they are one; never rounds or cuts.

    ``what`` names the values in an InputError. Copying a torch tensor from a GPU waits for the GPU.
    """
    if isinstance(values, np.ndarray):
        array: npt.NDArray[Any] = values
    elif hasattr(values, "data_ptr"):
        try:
            array = cast(Any, values).detach().cpu().numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:  # meta, sparse
            words = f"{what} must be a vector of integers, got a tensor: {error}"
            raise InputError(words) from error
    else:
        array = _of_items(values, what)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{what} must be a vector of integers, got an array of shape {array.shape} of "
            f"{array.dtype}"
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > _MOST_INT64:
        raise InputError(f"{what} must fit 64 signed bits, got {int(array.max())}")
    return array.astype(np.int64, copy=False)


def integer(value: object, what: str) -> int:
    """Return an integer of any integral type as int; InputError for others, also True and 1.0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be an integer, got {type(value).__name__} {value!r}")
    return int(value)


def _of_items(values: Any, what: str) -> npt.NDArray[np.int64]:
    if isinstance(values, _NO_VECTORS) or not isinstance(values, Iterable):
        raise InputError(f"{what} must be a sequence of integers, got {type(values).__name__}")
    items = values if isinstance(values, (list, tuple)) else list(values)
    # By type, not by value: numpy would take True as 1 and cut 1.5 to 1.
    for kind in set(map(type, items)):
        if kind is not int and (issubclass(kind, bool) or not issubclass(kind, Integral)):
            raise InputError(f"{what} must be integers, got a {kind.__name__}")
    try:
        return np.fromiter(items, dtype=np.int64, count=len(items))
    except OverflowError:
        worst = max(items, key=abs)
        raise InputError(f"{what} must fit 64 signed bits, got {quoted(worst)}") from None


_LONGEST_NAME = 64
FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""``package.module:name``, which a setting accepts besides kvferry's own names."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint at the ``known`` name most like ``name``; empty if none is similar."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def find_factory(path: str, *, what: str, where: str) -> Callable[..., Any]:
    """Return the callable that ``package.module:name`` names; ConfigError if there is none.

    ``what`` begins the message; ``where`` names the process that needs the module installed.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{what}: {module} cannot be imported ({error}); install it where the engine's "
            f"{where}, or correct the setting"
        ) from error
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"{what}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{what}: {module} has no factory {name} that can be called")
    return cast("Callable[..., Any]", found)
