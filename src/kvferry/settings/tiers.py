"""Settings of the lower tiers: disk directories, tiers of other kinds, the shared store.

::

    memory:2GiB                      a kind of kvferry and its options
    near=memory:2GiB                 the same under another name
    my_package.store:open_store:xyz  another tier: module, factory, and its options
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000    the part from ? on is optional
    gs://bucket/prefix  az://container/prefix?account=name  file:///mnt/shared/kvferry
    mooncake://master:50051?metadata=P2PHANDSHAKE&protocol=tcp&segment=4GiB
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kvferry.core.quantities import FACTORY, nearest, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.kinds import (
    SIZE,
    SIZE_OR_ZERO,
    Kind,
    matching,
    one_of,
    read_file_name,
    split_list,
)
from kvferry.types import DEVICE, HOST, TierName

_MOST_DIRECTORIES = 16


def read_directories(name: str, value: object) -> tuple[str, ...]:
    """Read directories, none within another, from text with commas or from a list."""
    given = [value] if isinstance(value, os.PathLike) else value
    parts = split_list(name, given, "a path or a list of paths", _MOST_DIRECTORIES)
    paths = [read_file_name(name, part) for part in parts]
    for at, path in enumerate(paths):
        for other in paths[:at]:
            if os.path.commonpath((path, other)) in (path, other):
                raise ConfigError(
                    f"{name}: {quoted(path)} and {quoted(other)} are not two directories apart; "
                    "give one for each drive"
                )
    return tuple(paths)


S3, GOOGLE, AZURE, FILES, MOONCAKE = "s3", "gs", "az", "file", "mooncake"
STORE_KINDS = (S3, GOOGLE, AZURE, FILES, MOONCAKE)

P2P = "P2PHANDSHAKE"
"""Mooncake's name for having no metadata server: clients ask each other."""

_URL = r"https?://(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+)(:[1-9][0-9]{0,4})?(/\S*)?"
_ANY = matching(r".+", "text")
_ENDPOINT = matching(_URL, "http://HOST:PORT or https://HOST:PORT")
_METADATA = matching(
    rf"{P2P}|(https?|etcd|redis)://[^/\s]+\S*",
    f"{P2P}, or the address of a metadata server such as http://MASTER:8080/metadata",
)
_OPTIONS: dict[str, dict[str, Kind[Any]]] = {
    S3: {"endpoint": _ENDPOINT, "region": _ANY},
    GOOGLE: {"endpoint": _ENDPOINT},
    AZURE: {
        "account": matching("[a-z0-9]{3,24}", "3 to 24 small letters and digits"),
        "endpoint": _ENDPOINT,
    },
    FILES: {},
    MOONCAKE: {
        "metadata": _METADATA,
        "protocol": one_of("tcp", "rdma"),
        "device": _ANY,
        "segment": SIZE_OR_ZERO,
        "host": _ANY,
    },
}
_EXAMPLES = (
    "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///DIRECTORY or "
    "mooncake://MASTER:PORT"
)
_NO_SECRETS = (
    "an address carries no credentials (nothing before an @), it is shown to people; give them to "
    "a cloud's store in the ordinary ways (AWS_ACCESS_KEY_ID, a profile, an instance's role), and "
    "Mooncake's Redis its password in MC_REDIS_PASSWORD"
)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*", re.ASCII)
_MOST_PREFIX = 512


@dataclass(frozen=True)
class RemoteAddress:
    """The valid address of a shared store; ``place`` is its bucket, or a master's host:port.

    A directory has no place: it is the prefix. An address holds no secret: it is shown to people.
    """

    kind: str
    place: str
    prefix: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        path = f"/{self.prefix}" if self.prefix else ""
        query = f"?{urlencode(self.options, safe=':/[]')}" if self.options else ""
        return f"{self.kind}://{self.place}{path}{query}"


def read_remote(name: str, value: object) -> RemoteAddress:
    """Read the address of a shared store; the ConfigError says what to write instead."""
    if isinstance(value, RemoteAddress):
        return value
    if isinstance(value, str) and "@" in unquote(unquote(value)):
        raise ConfigError(f"{name}: {_NO_SECRETS}")  # shows no part of the value
    if not isinstance(value, str) or not value.isprintable():
        raise ConfigError(f"{name}: expected {_EXAMPLES}, got {shown(value)}")
    try:
        parts = urlsplit(value.strip())
        pairs = parse_qsl(parts.query, strict_parsing=bool(parts.query))
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{name}: {quoted(value)} is no address ({error})") from error
    if parts.scheme not in _OPTIONS:
        raise ConfigError(f"{name}: expected {_EXAMPLES}, got {shown(value)}")
    kind, path, options = parts.scheme, unquote(parts.path).strip("/"), dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{name}: every option may be given once, got {quoted(parts.query)}")
    for option, text in options.items():
        takes = _OPTIONS[kind].get(option)
        if takes is None:
            raise ConfigError(
                f"{name}: {kind}:// has no option {quoted(option)}; options: "
                f"{', '.join(_OPTIONS[kind]) or 'none'}"
            )
        options[option] = takes.show(takes.read(f"{name}: {option}", text))
    if kind == MOONCAKE:
        if not parts.hostname or not port or path:
            raise ConfigError(f"{name}: expected mooncake://MASTER:PORT, got {quoted(value)}")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return RemoteAddress(kind, f"{host}:{port}", "", options)
    if kind == FILES and (parts.netloc or not path):
        raise ConfigError(f"{name}: expected file:///DIRECTORY with its whole path")
    if kind != FILES and not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"{name}: {quoted(parts.netloc)} cannot be a bucket; names are 3 to 63 small letters, "
            "digits, dots and hyphens"
        )
    is_path = _PREFIX.fullmatch(path) and not {".", ".."} & set(path.split("/"))
    if path and (len(path) > _MOST_PREFIX or not is_path):
        raise ConfigError(
            f"{name}: {quoted(path)} cannot be a prefix here; use letters, digits, . _ = - "
            f"and single slashes between them, at most {_MOST_PREFIX}"
        )
    return RemoteAddress(kind, parts.netloc, path, options)


_MOST_TIERS = 8
_EXAMPLE = "memory:2GiB"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
_NAMED = re.compile(r"([^:=]*)=(.*)", re.DOTALL)
_FACTORY_TIER = re.compile(rf"({FACTORY.pattern})(?::(.*))?", re.ASCII | re.DOTALL)
_TAKEN = (DEVICE, HOST, "other")  # have another meaning in metrics and transfers

DISK = TierName("disk")
"""Name and kind of the tier that the setting ``disk`` opens."""
REMOTE = TierName("remote")
"""Name and kind of the tier that the setting ``remote`` opens."""

_KINDS = {
    "memory": "kvferry.tiers.memory:open_placed",
    "memory-by-key": "kvferry.tiers.memory:open_keyed",
}
"""Factory of each kind of tier whose only option is its size. A new kind adds a line here."""


@dataclass(frozen=True)
class TierSpec:
    """One tier as the settings describe it: its name, the factory that opens it, and options."""

    name: TierName
    kind: str
    options: str
    factory: str

    @property
    def persists(self) -> bool:
        """Whether its blocks may survive this process: those in its own memory do not."""
        return self.kind not in _KINDS

    def __str__(self) -> str:
        """Return the tier as the setting ``tiers`` would have it."""
        text = f"{self.kind}:{self.options}" if self.options else self.kind
        return text if self.name == _default_name(self.kind) else f"{self.name}={text}"


def _default_name(kind: str) -> str:
    """Return the name of a tier without a given one: its kind, or its factory's module."""
    return kind if kind in _KINDS else kind.split(":")[0].rpartition(".")[2].lower()


def join_tiers(
    disk: Sequence[str], tiers: Sequence[TierSpec], remote: RemoteAddress | None
) -> tuple[TierSpec, ...]:
    """Return all tiers of the settings, nearest first. ConfigError if two have the same name."""
    joined = list(tiers)
    if disk:
        factory = "kvferry.tiers.disk.tier:open_disk"
        joined.insert(0, TierSpec(DISK, DISK, ", ".join(disk), factory))
    if remote is not None:
        factory = "kvferry.tiers.remote.tier:open_remote"
        joined.append(TierSpec(REMOTE, REMOTE, str(remote), factory))
    for name, count in Counter(tier.name for tier in joined).items():
        if count > 1:
            raise ConfigError(
                f"tiers: {count} tiers are called {name}; give them names of their own, such as "
                f"far={name}..."
            )
    return tuple(joined)


def read_tiers(name: str, value: object) -> tuple[TierSpec, ...]:
    """Read tiers, nearest first, from text with commas or from a list."""
    parts = split_list(name, value, f"tiers such as {_EXAMPLE}", _MOST_TIERS)
    return tuple(_read_tier(name, part) for part in parts)


def show_tiers(tiers: tuple[TierSpec, ...]) -> str:
    """Return tiers as the setting ``tiers`` would have them."""
    return ", ".join(map(str, tiers)) or "none"


def _read_tier(setting: str, value: object) -> TierSpec:
    if isinstance(value, TierSpec):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{setting}: expected a tier such as {_EXAMPLE}, got {shown(value)}")
    named = _NAMED.fullmatch(value.strip())
    own_name, text = (named[1].strip(), named[2].strip()) if named else ("", value.strip())
    word, _, options = text.partition(":")
    kind, own = word.strip().lower(), _FACTORY_TIER.fullmatch(text)
    if kind in _KINDS:
        size = SIZE.show(SIZE.read(f"{setting}: {kind}", options))
        spec = TierSpec(TierName(own_name or kind), kind, size, _KINDS[kind])
    elif own is not None:  # a user's factory; it is imported when the tier is opened
        factory, options = own[1], (own[2] or "").strip()
        spec = TierSpec(TierName(own_name or _default_name(factory)), factory, options, factory)
    else:
        hint = nearest(kind, tuple(_KINDS))
        if kind in (DISK, REMOTE, *STORE_KINDS):
            hint = "; a disk and a shared store have settings of their own, disk and remote"
        raise ConfigError(
            f"{setting}: there is no kind of tier {quoted(text)}{hint}; kinds: "
            f"{', '.join(f'{name}:SIZE' for name in _KINDS)}; or a factory of your own: "
            "package.module:function"
        )
    if not _NAME.fullmatch(spec.name) or spec.name in _TAKEN:
        raise ConfigError(
            f"{setting}: a tier cannot be called {quoted(spec.name)}; names are small letters, "
            f"digits, - and _, begin with a letter, and are not {', '.join(_TAKEN)}. Give it one: "
            f"NAME={quoted(text)[1:-1]}"
        )
    return spec
