"""Which tiers there are below host memory, and how the settings name them.

::

    memory:2GiB                      a kind of kvferry and its options
    near=memory:2GiB                 the same under another name
    my_package.store:open_store:xyz  another tier: module, factory, and its options
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000    what is behind ? may be left out
    gs://bucket/prefix  az://container/prefix?account=name  file:///mnt/shared/kvferry
    mooncake://master:50051?metadata=P2PHANDSHAKE&protocol=tcp&segment=4GiB
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kvferry.core.quantities import FACTORY, format_size, nearest, parse_size, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.kinds import read_file_name, split_list
from kvferry.types import DEVICE, HOST, TierName

_MOST_DIRECTORIES = 16


def read_directories(name: str, value: object) -> tuple[str, ...]:
    """Directories, none within another, from one text with commas or from a list."""
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

_OPTIONS = {
    S3: ("endpoint", "region"),
    GOOGLE: ("endpoint",),
    AZURE: ("account", "endpoint"),
    FILES: (),
    MOONCAKE: ("metadata", "protocol", "device", "segment", "host"),
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
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*", re.ASCII)
_MOST_PREFIX = 512

P2P = "P2PHANDSHAKE"
"""Mooncake's word for no metadata server: clients ask each other."""
_METADATA = re.compile(r"(https?|etcd|redis)://[^/\s]+\S*")


@dataclass(frozen=True)
class RemoteAddress:
    """A store's address, checked: ``place`` is a bucket, or a master's host:port.

    A directory has no place: it is the prefix. No secret is part of an address: people see it.
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
    """The address of a shared store; ConfigError that says what to write instead."""
    if isinstance(value, RemoteAddress):
        return value
    if isinstance(value, str) and "@" in unquote(unquote(value)):
        raise ConfigError(f"{name}: {_NO_SECRETS}")  # nothing of it is shown
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
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{name}: every option may be given once, got {quoted(parts.query)}")
    for option in options:
        if option == "pack":
            raise ConfigError(
                f"{name}: the option pack was removed: every block is an object; where blocks are "
                "small, a larger block size of the engine makes fewer objects"
            )
        if option not in _OPTIONS[parts.scheme]:
            raise ConfigError(
                f"{name}: {parts.scheme}:// has no option {quoted(option)}; options: "
                f"{', '.join(_OPTIONS[parts.scheme]) or 'none'}"
            )
    path = unquote(parts.path).strip("/")
    if parts.scheme == MOONCAKE:
        return _mooncake(name, parts.hostname or "", port, path, options)
    return _bucket(name, parts.scheme, parts.netloc, path, options)


def _bucket(
    name: str, kind: str, bucket: str, prefix: str, options: Mapping[str, str]
) -> RemoteAddress:
    if kind == FILES and (bucket or not prefix):
        raise ConfigError(f"{name}: expected file:///DIRECTORY with its whole path")
    if kind != FILES and not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{name}: {quoted(bucket)} cannot be a bucket; names are 3 to 63 small letters, "
            "digits, dots and hyphens"
        )
    account = options.get("account")
    if account is not None and not _ACCOUNT.fullmatch(account):
        expected = "3 to 24 small letters and digits"
        raise ConfigError(f"{name}: account: expected {expected}, got {shown(account)}")
    is_path = _PREFIX.fullmatch(prefix) and not {".", ".."} & set(prefix.split("/"))
    if prefix and (len(prefix) > _MOST_PREFIX or not is_path):
        raise ConfigError(
            f"{name}: {quoted(prefix)} cannot be a prefix here; use letters, digits, . _ = - "
            f"and single slashes between them, at most {_MOST_PREFIX}"
        )
    endpoint = options.get("endpoint")
    if endpoint is not None and not _is_endpoint(endpoint):
        expected = "http://HOST:PORT or https://HOST:PORT"
        raise ConfigError(f"{name}: endpoint: expected {expected}, got {shown(endpoint)}")
    return RemoteAddress(kind, bucket, prefix, options)


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, an invalid port
        return False


def _mooncake(
    name: str, host: str, port: int | None, path: str, options: dict[str, str]
) -> RemoteAddress:
    if not host or not port:
        raise ConfigError(f"{name}: expected mooncake://MASTER:PORT, got no host or no port")
    if path:
        raise ConfigError(f"{name}: mooncake:// has no path, got {quoted(path)}")
    protocol = options.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"{name}: protocol: expected tcp or rdma, got {shown(protocol)}")
    metadata = options.get("metadata", P2P)
    if metadata != P2P and not _METADATA.fullmatch(metadata):
        raise ConfigError(
            f"{name}: metadata: expected {P2P}, or the address of a metadata server such as "
            f"http://MASTER:8080/metadata, got {shown(metadata)}"
        )
    if "segment" in options:
        size = parse_size(options["segment"], name=f"{name}: segment", minimum=0, needs_unit=True)
        options["segment"] = format_size(size)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return RemoteAddress(MOONCAKE, place, "", options)


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


_KINDS = {
    "memory": "kvferry.tiers.memory:open_placed",
    "memory-by-key": "kvferry.tiers.memory:open_keyed",
}
"""Factories of tiers whose option is their size. A new kind adds a line here."""


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
        return self.kind not in _KINDS

    def __str__(self) -> str:
        """As a setting would write it."""
        told = f"{self.kind}:{self.options}" if self.options else self.kind
        return told if self.name == _default_name(self.kind) else f"{self.name}={told}"


def _default_name(kind: str) -> str:
    """The name of a tier that was given none: its kind, or the module of its factory."""
    return kind if kind in _KINDS else kind.split(":")[0].rpartition(".")[2].lower()


def join_tiers(
    disk: Sequence[str], tiers: Sequence[TierSpec], remote: RemoteAddress | None
) -> tuple[TierSpec, ...]:
    """All tiers that the settings name, nearest first. ConfigError where two have one name."""
    joined = list(tiers)
    if disk:
        factory = "kvferry.tiers.disk.tier:open_disk"
        joined.insert(0, TierSpec(DISK, DISK, ", ".join(disk), factory))
    if remote is not None:
        factory = "kvferry.tiers.remote.tier:open_remote"
        joined.append(TierSpec(REMOTE, REMOTE, str(remote), factory))
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
    kind = word.strip().lower()
    if kind not in _KINDS:
        spec = _read_own(setting, told, own_name)
    else:
        what = f"{setting}: {kind}"
        if not options.strip():
            raise ConfigError(f"{what} needs SIZE: {kind}:SIZE")
        size = format_size(parse_size(options.strip(), name=what, needs_unit=True))
        spec = TierSpec(TierName(own_name or kind), kind, size, _KINDS[kind])
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
        hint = nearest(word, tuple(_KINDS))
        if word == DISK:
            hint = "; a disk has a setting of its own, disk = PATH"
        if word == REMOTE or word in STORE_KINDS:
            hint = "; a shared store has a setting of its own, remote = URL"
        raise ConfigError(
            f"{setting}: there is no kind of tier {quoted(told)}{hint}; kinds: "
            f"{', '.join(f'{name}:SIZE' for name in _KINDS)}; or a factory of your own: "
            "package.module:function"
        )
    factory, options = own[1], (own[2] or "").strip()
    return TierSpec(TierName(own_name or _default_name(factory)), factory, options, factory)
