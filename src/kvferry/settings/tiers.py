"""Which kinds of tier there are below the host, and how a setting names one.

::

    memory:2GiB                      a kind of ours and its options
    near=memory:2GiB                 the same under a name of its own
    my_package.store:open_store:xyz  a tier of yours: module, factory, and what it is told

A kind is a short name for a factory; whoever adds one adds a line to ``KINDS``.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.quantities import format_size, parse_size, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.remote import STORE_KINDS
from kvferry.types import DEVICE, HOST, TierName

_MOST_TIERS = 8
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
_NAMED = re.compile(r"([^:=]*)=(.*)", re.DOTALL)
_OWN = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)(?::(.*))?", re.ASCII | re.DOTALL)
DISK = TierName("disk")
"""The tier that the setting ``disk`` makes, and its kind."""
REMOTE = TierName("remote")
"""The tier that the setting ``remote`` makes, and its kind."""

_TAKEN = (DEVICE, HOST, "other")
"""Names that mean something else in figures and transfers."""


@dataclass(frozen=True)
class TierKind:
    """One kind: ``factory`` opens it, ``read`` puts its options into normal form or refuses them.

    ``read`` is given the words to begin a refusal with, and the options.
    """

    name: str
    options: str
    words: str
    factory: str
    read: Callable[[str, str], str]


@dataclass(frozen=True)
class TierSpec:
    """One tier as the settings name it: which factory opens it, and with what."""

    name: TierName
    kind: str
    options: str
    factory: str

    @property
    def outlives_us(self) -> bool:
        """Whether what it holds may be there after the process ended: all but our own memory."""
        return self.kind not in _BY_NAME

    def __str__(self) -> str:
        """As a setting would write it."""
        told = f"{self.kind}:{self.options}" if self.options else self.kind
        return told if self.name == default_name(self.kind) else f"{self.name}={told}"


def _size(what: str, options: str) -> str:
    return format_size(parse_size(options, name=what))


KINDS = (
    TierKind(
        "memory",
        "SIZE",
        "ordinary memory, not pinned, with places that kvferry gives out; to try tiers out",
        "kvferry.tiers.memory:open_placed",
        _size,
    ),
    TierKind(
        "memory-by-key",
        "SIZE",
        "the same as a store that finds blocks by their keys, and has to be asked",
        "kvferry.tiers.memory:open_keyed",
        _size,
    ),
)

_BY_NAME = {kind.name: kind for kind in KINDS}


def default_name(kind: str) -> str:
    """What a tier is called that was given no name: its kind, or the module of its factory."""
    return kind if kind in _BY_NAME else kind.split(":")[0].rpartition(".")[2].lower()


def disk_tier(directories: Sequence[str]) -> TierSpec:
    """The disk as a tier: its settings are settings of their own, not options."""
    return TierSpec(DISK, DISK, ", ".join(directories), "kvferry.tiers.disk.tier:open_disk")


def remote_tier(address: str) -> TierSpec:
    """A shared store as a tier."""
    return TierSpec(REMOTE, REMOTE, address, "kvferry.tiers.remote.opening:open_remote")


def join_tiers(
    disk: Sequence[str], tiers: Sequence[TierSpec], remote: str | None
) -> tuple[TierSpec, ...]:
    """All that the settings name, nearest first. ConfigError where two have one name."""
    above = (disk_tier(disk),) if disk else ()
    below = (remote_tier(remote),) if remote is not None else ()
    for own in (*above, *below):
        if any(tier.name == own.name for tier in tiers):
            raise ConfigError(
                f"tiers: one is called {own.name}, as the tier is that the setting {own.name} "
                f"makes; give it another name, such as far={own.name}..."
            )
    return (*above, *tiers, *below)


def read_tiers(name: str, value: object) -> tuple[TierSpec, ...]:
    """TierShapes, nearest first, from one text with commas or from a list of texts."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    parts: Sequence[object]
    if isinstance(value, str):
        parts = value.split(",")
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        raise ConfigError(f"{name}: expected tiers such as {_example()}, got {shown(value)}")
    if len(parts) > _MOST_TIERS:
        raise ConfigError(f"{name}: at most {_MOST_TIERS} tiers, got {len(parts)}")
    tiers = tuple(_read_tier(name, part) for part in parts)
    for taken, count in Counter(tier.name for tier in tiers).items():
        if count > 1:
            raise ConfigError(
                f"{name}: {count} tiers are called {taken}; give them names of their own, such as "
                f"far={next(tier for tier in tiers if tier.name == taken).kind}:..."
            )
    return tiers


def show_tiers(tiers: tuple[TierSpec, ...]) -> str:
    return ", ".join(str(tier) for tier in tiers) or "none"


def _read_tier(setting: str, value: object) -> TierSpec:
    if isinstance(value, TierSpec):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{setting}: expected a tier such as {_example()}, got {shown(value)}")
    text = value.strip()
    named = _NAMED.fullmatch(text)
    own_name, told = (named[1].strip(), named[2].strip()) if named else ("", text)
    word, _, options = told.partition(":")
    kind = _BY_NAME.get(word.strip().lower())
    if kind is not None:
        what = f"{setting}: {kind.name}"
        if not options.strip():
            raise ConfigError(f"{what} needs {kind.options}: {kind.name}:{kind.options}")
        spec = TierSpec(
            TierName(own_name or kind.name),
            kind.name,
            kind.read(what, options.strip()),
            kind.factory,
        )
    else:
        spec = _read_own(setting, told, own_name)
    if not _NAME.fullmatch(spec.name) or spec.name in _TAKEN:
        raise ConfigError(
            f"{setting}: a tier cannot be called {quoted(spec.name)}; names are small letters, "
            f"digits, - and _, begin with a letter, and are not {', '.join(_TAKEN)}. Give it one: "
            f"NAME={quoted(told)[1:-1]}"
        )
    return spec


def _read_own(setting: str, told: str, own_name: str) -> TierSpec:
    """A factory of somebody else's; it is looked for when the tier is opened."""
    own = _OWN.fullmatch(told)
    if own is None:
        word = told.partition(":")[0][:64].strip().lower()
        near = difflib.get_close_matches(word, _BY_NAME, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if word == DISK:
            hint = "; a disk has a setting of its own, disk = PATH;"
        if word == REMOTE or word in STORE_KINDS:
            hint = "; a shared store has a setting of its own, remote = URL;"
        raise ConfigError(
            f"{setting}: there is no kind of tier {quoted(told)}{hint or ';'} kinds: "
            f"{', '.join(f'{kind.name}:{kind.options}' for kind in KINDS)}; or a factory of your "
            "own: package.module:function"
        )
    factory, options = own[1], (own[2] or "").strip()
    return TierSpec(TierName(own_name or default_name(factory)), factory, options, factory)


def _example() -> str:
    return f"{KINDS[0].name}:2GiB"
