"""Which kinds of tier there are below host memory, and how a setting names one.

::

    memory:2GiB                      a kind of kvferry and its options
    near=memory:2GiB                 the same under another name
    my_package.store:open_store:xyz  another tier: module, factory, and its options
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.factories import FACTORY, nearest
from kvferry.core.quantities import format_size, parse_size, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.kinds import split_list
from kvferry.settings.remote import STORE_KINDS
from kvferry.types import DEVICE, HOST, TierName

_MOST_TIERS = 8
_EXAMPLE = "memory:2GiB"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
_NAMED = re.compile(r"([^:=]*)=(.*)", re.DOTALL)
_OWN = re.compile(rf"({FACTORY.pattern})(?::(.*))?", re.ASCII | re.DOTALL)
_TAKEN = (DEVICE, HOST, "other")  # mean something else in figures and transfers

DISK = TierName("disk")
"""The tier that the setting ``disk`` makes, and its kind."""
REMOTE = TierName("remote")
"""The tier that the setting ``remote`` makes, and its kind."""


@dataclass(frozen=True)
class TierKind:
    """A short name for the factory of a tier, whose option is its size."""

    name: str
    factory: str


KINDS = (
    TierKind("memory", "kvferry.tiers.memory:open_placed"),
    TierKind("memory-by-key", "kvferry.tiers.memory:open_keyed"),
)
"""A new kind adds a line here."""
_BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class TierSpec:
    """One tier as the settings name it: which factory opens it, and with what options."""

    name: TierName
    kind: str
    options: str
    factory: str

    @property
    def outlives_us(self) -> bool:
        """Whether its blocks may be there after the process ended: not in our own memory."""
        return self.kind not in _BY_NAME

    def __str__(self) -> str:
        """As a setting would write it."""
        told = f"{self.kind}:{self.options}" if self.options else self.kind
        return told if self.name == _default_name(self.kind) else f"{self.name}={told}"


def _default_name(kind: str) -> str:
    """The name of a tier that was given none: its kind, or the module of its factory."""
    return kind if kind in _BY_NAME else kind.split(":")[0].rpartition(".")[2].lower()


def join_tiers(
    disk: Sequence[str], tiers: Sequence[TierSpec], remote: str | None
) -> tuple[TierSpec, ...]:
    """All tiers that the settings name, nearest first. ConfigError where two have one name."""
    joined = list(tiers)
    if disk:
        factory = "kvferry.tiers.disk.tier:open_disk"
        joined.insert(0, TierSpec(DISK, DISK, ", ".join(disk), factory))
    if remote is not None:
        joined.append(TierSpec(REMOTE, REMOTE, remote, "kvferry.tiers.remote.tier:open_remote"))
    own = [tier.name for tier in joined if tier.kind in (DISK, REMOTE)]
    for tier in tiers:
        if tier.name in own:
            raise ConfigError(
                f"tiers: one is called {tier.name}, like the tier that the setting {tier.name} "
                f"makes; give it another name, such as far={tier.name}..."
            )
    return tuple(joined)


def read_tiers(name: str, value: object) -> tuple[TierSpec, ...]:
    """Tiers, nearest first, from one text with commas or from a list of texts."""
    parts = split_list(name, value, f"tiers such as {_EXAMPLE}", _MOST_TIERS)
    tiers = tuple(_read_tier(name, part) for part in parts)
    for taken, count in Counter(tier.name for tier in tiers).items():
        if count > 1:
            raise ConfigError(
                f"{name}: {count} tiers are called {taken}; give them names of their own, such as "
                f"far={next(tier for tier in tiers if tier.name == taken).kind}:..."
            )
    return tiers


def show_tiers(tiers: tuple[TierSpec, ...]) -> str:
    """Tiers as a setting would write them."""
    return ", ".join(map(str, tiers)) or "none"


def _read_tier(setting: str, value: object) -> TierSpec:
    if isinstance(value, TierSpec):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{setting}: expected a tier such as {_EXAMPLE}, got {shown(value)}")
    named = _NAMED.fullmatch(value.strip())
    own_name, told = (named[1].strip(), named[2].strip()) if named else ("", value.strip())
    word, _, options = told.partition(":")
    kind = _BY_NAME.get(word.strip().lower())
    if kind is None:
        spec = _read_own(setting, told, own_name)
    else:
        what = f"{setting}: {kind.name}"
        if not options.strip():
            raise ConfigError(f"{what} needs SIZE: {kind.name}:SIZE")
        size = format_size(parse_size(options.strip(), name=what))
        spec = TierSpec(TierName(own_name or kind.name), kind.name, size, kind.factory)
    if not _NAME.fullmatch(spec.name) or spec.name in _TAKEN:
        raise ConfigError(
            f"{setting}: a tier cannot be called {quoted(spec.name)}; names are small letters, "
            f"digits, - and _, begin with a letter, and are not {', '.join(_TAKEN)}. Give it one: "
            f"NAME={quoted(told)[1:-1]}"
        )
    return spec


def _read_own(setting: str, told: str, own_name: str) -> TierSpec:
    """A user's factory; it is looked up when the tier is opened."""
    own = _OWN.fullmatch(told)
    if own is None:
        word = told.partition(":")[0].strip().lower()
        hint = nearest(word, tuple(_BY_NAME))
        if word == DISK:
            hint = "; a disk has a setting of its own, disk = PATH"
        if word == REMOTE or word in STORE_KINDS:
            hint = "; a shared store has a setting of its own, remote = URL"
        raise ConfigError(
            f"{setting}: there is no kind of tier {quoted(told)}{hint}; kinds: "
            f"{', '.join(f'{name}:SIZE' for name in _BY_NAME)}; or a factory of your own: "
            "package.module:function"
        )
    factory, options = own[1], (own[2] or "").strip()
    return TierSpec(TierName(own_name or _default_name(factory)), factory, options, factory)
