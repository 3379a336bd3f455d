"""Hints that clients send with a request: what to store, how long to keep it, which tenant.

Hints never change answers: a wrong hint costs time only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from kvferry.core.quantities import nearest, parse_count, parse_seconds, quoted, shown
from kvferry.errors import ConfigError, InputError

DEFAULT_PRIORITY = 35
"""Priority of blocks without one; TensorRT-LLM's default, so its requests need no change."""
MOST_PRIORITY = 100
MOST_RANGES = 64
MOST_TENANT_CHARS = 64


@dataclass(frozen=True, kw_only=True)
class TokenPriority:
    """Priority, 0 to 100, of the blocks of a token range, for ``duration_ms`` or until evicted.

    ``token_end`` is the first token after the range; None: the range has no end.
    """

    token_start: int = 0
    token_end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        start = _count("token_start", self.token_start)
        object.__setattr__(self, "token_start", start)
        if self.token_end is not None:
            end = _count("token_end", self.token_end)
            object.__setattr__(self, "token_end", end)
            if end <= start:
                raise InputError(f"priorities: token_end {end} must be above token_start {start}")
        object.__setattr__(self, "priority", _count("priority", self.priority, MOST_PRIORITY))
        if self.duration_ms is not None:
            duration = _count("duration_ms", self.duration_ms, 10**12, least=1)
            object.__setattr__(self, "duration_ms", duration)


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The hints of one request. Frozen; InputError if they contradict each other.

    Only the first ``max_store_tokens`` tokens are stored, and ``max_load_tokens`` loaded; zero:
    none. ``ended``: the conversation will not continue. ``continues``: it will, in ``within``
    seconds. ``pin_seconds`` count from the request's end. Blocks count against the quota of
    ``tenant``; without a tenant, ``session`` names the sender of the hints. ``max_*`` and
    ``pin_seconds`` are commands; the rest is evidence. ``priorities`` may be a list of mappings.
    """

    max_store_tokens: int | None = None
    max_load_tokens: int | None = None
    pin_seconds: float | None = None
    ended: bool = False
    continues: bool = False
    within: float | None = None
    priorities: tuple[TokenPriority, ...] = ()
    tenant: str = ""
    session: str = ""

    def __post_init__(self) -> None:
        for name in ("max_store_tokens", "max_load_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _count(name, getattr(self, name)))
        for name in ("pin_seconds", "within"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read_seconds(name, getattr(self, name)))
        for name in ("ended", "continues"):
            _flag(name, getattr(self, name))
        if self.within is not None and not self.continues:
            raise InputError("within says until when a conversation continues: give continues too")
        if self.ended and (self.continues or self.pin_seconds is not None):
            other = "continues" if self.continues else "pin_seconds"
            raise InputError(f"a conversation that ended cannot have {other}; give one of the two")
        object.__setattr__(self, "priorities", _ranges(self.priorities))
        for name in ("tenant", "session"):
            given: object = getattr(self, name)
            is_text = isinstance(given, str) and len(given) <= MOST_TENANT_CHARS
            if not is_text or not str(given).isprintable():
                raise InputError(
                    f"{name} must be a name of at most {MOST_TENANT_CHARS} printable characters, "
                    f"got {shown(given)}"
                )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Hints:
        """Read hints from plain data of a request; InputError for a name that is no hint."""
        if not isinstance(given, Mapping):
            raise InputError(f"hints must be a mapping, got {shown(given)}")
        read: dict[str, Any] = {}
        for name, value in given.items():
            if name == "do_not_store" or name == "do_not_load":
                if _flag(name, value):
                    read[f"max_{name.removeprefix('do_not_')}_tokens"] = 0
            elif name == "continues" and not isinstance(value, bool):
                read["continues"], read["within"] = True, read_seconds(name, value)
            elif name in _PLAIN:
                read[name] = value
            else:
                near = nearest(str(name), NAMES) or f"; hints: {', '.join(NAMES)}"
                raise InputError(f"there is no hint {quoted(name)}{near}")
        return cls(**read)

    def as_dict(self) -> dict[str, object]:
        """Return the hints that differ from their defaults, as plain data."""
        every = asdict(self)
        return {f.name: every[f.name] for f in fields(self) if getattr(self, f.name) != f.default}

    def after(self, seconds: float) -> Hints:
        """Return the hints that still hold ``seconds`` after the request's end."""
        if seconds <= 0 or (self.pin_seconds is None and self.within is None):
            return self
        pin, within = self.pin_seconds, self.within
        return replace(
            self,
            pin_seconds=pin - seconds if pin is not None and pin > seconds else None,
            continues=self.continues and (within is None or within > seconds),
            within=within - seconds if within is not None and within > seconds else None,
        )

    @property
    def shapes_what_stays(self) -> bool:
        """Whether any hint is about keeping stored blocks."""
        return bool(self.ended or self.continues or self.priorities) or self.pin_seconds is not None


_PLAIN = tuple(field.name for field in fields(Hints) if field.name != "within")
NAMES = ("do_not_store", "do_not_load", *_PLAIN)
"""The names of all hints."""


def read_seconds(name: str, value: object) -> float:
    """Return seconds from a number or text such as ``30s``; InputError if it is no time."""
    try:
        return parse_seconds(value, name=name)
    except ConfigError as error:
        raise InputError(str(error)) from None


def _ranges(value: object) -> tuple[TokenPriority, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InputError(f"priorities: expected a list of ranges, got {shown(value)}")
    if len(value) > MOST_RANGES:
        raise InputError(f"priorities: at most {MOST_RANGES} ranges, got {len(value)}")
    return tuple(each if isinstance(each, TokenPriority) else _range(each) for each in value)


def _range(value: object) -> TokenPriority:
    known = {field.name for field in fields(TokenPriority)}
    if not isinstance(value, Mapping) or not known.issuperset(value):
        raise InputError(
            "priorities: each range has token_start, token_end, priority and duration_ms, "
            f"got {shown(value)}"
        )
    return TokenPriority(**value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {shown(value)}")
    return value


def _count(name: str, value: object, most: int = 2**40, least: int = 0) -> int:
    try:
        return parse_count(value, name=name, minimum=least, maximum=most)
    except ConfigError as error:
        raise InputError(str(error)) from None


class Hinted(NamedTuple):
    """Hints applied to blocks; ``refused`` says, in words, which had no effect and why."""

    hints: Hints
    refused: Sequence[str]
