"""The table of all settings: name, default, accepted values, help.

A setting is one row of :class:`Config`. Its reader, its environment variable, its line in
:func:`describe` and its row in the documentation derive from that row. Every source of a value
(arguments, a mapping, a file, the environment) uses the same reader.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from kvferry.core.quantities import GiB, MiB, nearest, quoted, shown
from kvferry.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from kvferry.settings.eviction import (
    ACCEPTS,
    DEFAULT_POLICY,
    DEFAULT_TIER_POLICY,
    TenantShare,
    read_policy,
    read_tenants,
)
from kvferry.settings.kinds import (
    ADDRESS,
    AUTO,
    COUNT,
    PORT,
    SECONDS,
    SECONDS_OR_ZERO,
    SHARE,
    SIZE,
    SIZE_OR_ZERO,
    Auto,
    Kind,
    one_of,
    optional,
    or_auto,
    read_file,
    read_file_name,
    read_key,
    read_secret,
)
from kvferry.settings.tiers import (
    MOONCAKE,
    RemoteAddress,
    TierSpec,
    join_tiers,
    read_directories,
    read_remote,
    read_tiers,
    show_tiers,
)

_MOST_FILE_BYTES = 1 * MiB
_LONGEST_PATH = 300

ENV_PREFIX = "KVFERRY_"

DISK_KEY_ENV, REMOTE_KEY_ENV = "KVFERRY_DISK_KEY", "KVFERRY_REMOTE_KEY"
"""Variables with encryption keys in base64. They are no settings, so their values are not shown."""

# Variables of the prefix that are no settings: config file, keys, debug switch, tests' switches.
_NOT_A_SETTING = re.compile(rf"({DISK_KEY_ENV}|{REMOTE_KEY_ENV})$|KVFERRY_(CONFIG$|DEBUG$|TEST_)")

# Kubernetes puts these into every pod for each service of its namespace. Beside a service that is
# called kvferry-metrics, KVFERRY_METRICS_PORT is tcp://10.0.0.1:9475 and no setting.
_SERVICE_LINK = re.compile(
    r"KVFERRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def _plain(name: str, most: int) -> str:
    """Return a name for a message: quoted if it is longer than ``most`` or not printable."""
    return name if name.isprintable() and len(name) <= most else quoted(name)


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable of each setting that has one, by the setting's name."""
    return {
        variable.removeprefix(ENV_PREFIX).lower(): variable
        for variable, value in env.items()
        if _is_setting(variable, value)
    }


def _is_setting(name: str, value: str) -> bool:
    if not name.startswith(ENV_PREFIX) or not value.strip() or _NOT_A_SETTING.match(name):
        return False
    is_url = name.endswith("PORT") and _SERVICE_URL.match(value.strip())
    return not is_url and not _SERVICE_LINK.match(name)


CONFIG_FILE_ENV = "KVFERRY_CONFIG"
"""Variable with the path of the configuration file, if ``Config.load`` is given none."""

REMOVED = {
    "ask_deadline": "use lookup_deadline",
    "disk_after": "use disk_admission",
    "keep_share": "use pin_share",
    "level_policy": "use tier_policy",
    "level_write": "use tier_write",
    "level_write_out": "use tier_flush",
    "levels": "use tiers",
    "remote_after": "use remote_admission",
    "store_after": "use store_threshold",
    "control": "a control_token turns control on, on metrics_port and metrics_host",
    "disk_for_others": "give each model a directory (disk) and a disk_size of its own",
    "disk_other_models_share": "give each model a directory (disk) and a disk_size of its own",
    "disk_direct": "kvferry reads and writes past the page cache where the file system can",
    "memory_curve": "record requests (record = PATH) and run kvferry simulate on the recording",
    "prefill_rate": "kvferry learns it from the requests that compute their prompts",
    "remote_bandwidth": "bound the traffic where it is shared: in the network, or at the store",
    "store_mode": "blocks are stored as they are computed",
    "copy_path": "kernels copy where they can, else the driver does",
    "overlap_stall": "overlap_loads finds out by itself when a load may overlap",
}
"""Removed settings, and the advice that an error gives for each."""

T = TypeVar("T")


def _list_of(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


ADMISSION = one_of("all", "requested-twice")
DIRECTORIES = Kind("PATH, ...|none", read_directories, _list_of)
LOG_LEVEL = one_of("debug", "info", "warning", "error", "critical")
FILE_NAME = optional(Kind("PATH", read_file_name))
POLICY = Kind(ACCEPTS, read_policy)
SECRET = optional(Kind("text or file:PATH", read_secret, lambda secret: "(not shown)"))
STORE = optional(Kind("URL", read_remote))
TENANTS = Kind("NAME=SHARE, ...|none", read_tenants, _list_of)
TIERS = Kind("KIND:OPTIONS, ...|none", read_tiers, show_tiers)


def setting(default: T, kind: Kind[T], *, basic: bool = False) -> T:
    """Make one row of the table; its docstring is its help. Most servers need only basic ones."""
    facts = {"kind": kind, "basic": basic}
    return field(default=default, repr=kind is not SECRET, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, checked and in normal form: sizes in bytes, times in seconds.

    Owns the values; leaves their use to others. Frozen; ``dataclasses.replace`` checks again.
    """

    host: int | Auto = setting(1 * GiB, or_auto(SIZE), basic=True)  # noqa: RUF009
    """Host memory that holds blocks, for each rank; auto: most of what this machine has left."""
    host_pin: str = setting("auto", one_of("auto", "required", "never"))
    """auto: pin host memory if the driver can. required: refuse to start if not. never: do not."""
    disk: tuple[str, ...] = setting((), DIRECTORIES, basic=True)
    """Keep blocks in these directories too, one for each drive. Blocks there survive a restart."""
    disk_size: int = setting(64 * GiB, SIZE, basic=True)
    """The most bytes that kvferry may use on disk: all directories, all ranks of this host and all
    models together."""
    disk_keep_free: int = setting(5 * GiB, SIZE_OR_ZERO)
    """Free space that kvferry leaves on the file system of each directory."""
    disk_admission: str = setting("all", ADMISSION)
    """all: write every block to disk that host memory is about to evict. requested-twice: only
    blocks that were requested twice."""
    disk_write_per_day: int | None = setting(None, optional(SIZE))
    """The most bytes to write to disk in 24 hours; none: no bound."""
    disk_deadline: float = setting(10.0, SECONDS)
    """A drive that has not answered for this long is unavailable until it answers."""
    disk_start_deadline: float = setting(5.0, SECONDS)
    """Start without a drive that takes longer to open. It is attached once it is open."""
    disk_key_file: str | None = setting(None, FILE_NAME)
    """Encrypt blocks on disk with the key in this file: 32 bytes, or their base64."""
    tiers: tuple[TierSpec, ...] = setting((), TIERS)
    """Tiers below host memory and below the disk, nearest first. memory:SIZE and memory-by-key:SIZE
    are ordinary memory, for each rank. package.module:factory is a tier of your own."""
    remote: RemoteAddress | None = setting(None, STORE, basic=True)  # noqa: RUF009
    """A store that servers share, below all tiers: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX,
    az://CONTAINER/PREFIX, file:///DIRECTORY or mooncake://MASTER:PORT."""
    remote_admission: str = setting("all", ADMISSION)
    """all: write every block to the shared store that host memory evicts (with tier_write =
    through: every stored block). requested-twice: only blocks that were requested twice by then."""
    remote_key_file: str | None = setting(None, FILE_NAME)
    """Encrypt shared blocks with the key in this file: 32 bytes, or their base64. All servers need
    the same key."""
    remote_mode: str = setting("read-write", one_of("read-write", "read-only"))
    """Read from the shared store and write to it, or only read the blocks of other servers."""
    remote_ttl: float | None = setting(None, optional(SECONDS))
    """Remove blocks of every model from a bucket or directory this long after they were written;
    none: never. Only one server at a time removes blocks."""
    tier_write: str = setting("spill", one_of("spill", "through"))
    """spill: copy blocks to the lower tiers when host memory is about to evict them. through: as
    soon as they are stored."""
    tier_flush: float = setting(10.0, SECONDS_OR_ZERO)
    """With spill: the longest time of a flush, while the engine is idle or at the end. A flush
    writes blocks to disk that only host memory holds. 0: write them only before eviction."""
    policy: str = setting(DEFAULT_POLICY, POLICY, basic=True)
    """The eviction policy of host memory."""
    tier_policy: str = setting(DEFAULT_TIER_POLICY, POLICY)
    """The eviction policy of every lower tier with slots."""
    block_tokens: int = setting(16, COUNT, basic=True)
    """Tokens in one block."""
    staging_ring: int = setting(64 * MiB, SIZE)
    """Device memory of the ring buffer through which blocks are stored."""
    load_deadline: float = setting(30.0, SECONDS)
    """Give up a load that takes longer."""
    store_deadline: float = setting(30.0, SECONDS)
    """Give up a store that takes longer."""
    match_deadline: float = setting(60.0, SECONDS)
    """Release a hit that was not loaded for this long."""
    promote_deadline: float = setting(10.0, SECONDS)
    """Give up a promotion from a lower tier that takes longer."""
    lookup_deadline: float = setting(1.0, SECONDS)
    """A lower tier that takes longer to answer a lookup counts as a miss."""
    store_threshold: int = setting(1, COUNT)
    """Store a block only once this many requests have asked for it."""
    load_policy: str = setting("auto", one_of("always", "auto"))
    """always: load every hit. auto: only where loading is expected to be faster than computing."""
    overlap_loads: str = setting("auto", one_of("auto", "off"))
    """Let a request run during its load, each layer after its own part of the load (vLLM only).
    auto: where no other request runs."""
    max_loading_blocks: int | None = setting(None, optional(COUNT))
    """Device blocks that loads may hold at one time; none: seven eighths of the device's."""
    max_storing_blocks: int | None = setting(None, optional(COUNT))
    """Device blocks that stores may hold at one time; none: a quarter of the device's, and at least
    64."""
    max_bytes_in_flight: int = setting(4 * GiB, SIZE)
    """The most bytes in flight at one time; stores wait first."""
    metrics_port: int | Auto | None = setting(AUTO, or_auto(optional(PORT)), basic=True)  # noqa: RUF009
    """Serve metrics and explanations on this port; none: do not serve them. auto: in a server, on
    9475 or the next free port; in the library, once serve_metrics() is called."""
    metrics_host: str = setting("127.0.0.1", ADDRESS)
    """The address to serve metrics on; the network can reach any but a loopback address."""
    pin_share: float = setting(0.25, SHARE)
    """The part of each tier that pins, TTLs and priorities may hold, at most."""
    tenants: tuple[TenantShare, ...] = setting((), TENANTS)
    """The share of host memory, and of every lower tier with slots, that each tenant keeps. * is
    every other tenant. A shared store decides itself what it keeps. A request's tenant is a hint,
    or its cache salt in vLLM."""
    control_token: str | None = setting(None, SECRET)
    """Serve pin, prefetch and drop over HTTP on metrics_port, to calls that carry this secret of at
    least 16 characters; none: do not serve them."""
    record: str | None = setting(None, FILE_NAME)
    """Write requests to this file as a trace for kvferry simulate, without their tokens; none: do
    not."""
    record_size: int = setting(256 * MiB, SIZE)
    """The most bytes of a recording, which is that file and its predecessor."""
    log_level: str = setting("warning", LOG_LEVEL, basic=True)
    """The lowest severity to log."""

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _kind(f.name).read(f.name, getattr(self, f.name)))
        join_tiers(self.disk, self.tiers, self.remote)  # refuses names that are taken
        if self.remote is not None and self.remote_ttl is not None:
            if self.remote.kind == MOONCAKE:
                raise ConfigError("remote_ttl: a Mooncake master evicts by itself; leave this out")
            if self.remote_mode == "read-only":
                raise ConfigError("remote_ttl: a read-only server removes nothing; leave this out")

    @property
    def all_tiers(self) -> tuple[TierSpec, ...]:
        """The tiers below host memory, nearest first: the disk, ``tiers``, the shared store."""
        return join_tiers(self.disk, self.tiers, self.remote)

    def disk_key(self, env: Mapping[str, str] | None = None) -> bytes | None:
        """Return the key that encrypts the disk; None without one. ConfigError if it is invalid."""
        return read_key("disk_key_file", self.disk_key_file, DISK_KEY_ENV, env)

    def remote_key(self, env: Mapping[str, str] | None = None) -> bytes | None:
        """Return the key that encrypts the shared store; None without one. ConfigError as above."""
        return read_key("remote_key_file", self.remote_key_file, REMOTE_KEY_ENV, env)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Config:
        """Return the settings with these values; ConfigError for a name that is no setting."""
        return cls(**_read(settings, "settings"))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        overrides: Mapping[str, object] | None = None,
        *,
        source: str = "overrides",
    ) -> Config:
        """Read all sources: overrides, then the environment, then the file, then the defaults.

        Without ``path`` the file is the one ``KVFERRY_CONFIG`` names, if any. An override of None
        counts as not given (as a command line leaves it); "none" sets None. Errors call the
        overrides ``source``.
        """
        env = os.environ if env is None else env
        path = path if path is not None else env.get(CONFIG_FILE_ENV) or None
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        read = _read_file(path) if path is not None else {}
        for name, variable in variables(env).items():
            read |= _read({name: env[variable]}, f"environment variable {_plain(variable, 64)}")
        return cls(**{**read, **_read(given, source)})


@dataclass(frozen=True)
class Setting:
    """One setting as text for people; ``basic`` ones are shown first."""

    name: str
    env: str
    accepts: str
    default: str
    help: str
    basic: bool


def describe() -> tuple[Setting, ...]:
    """Return every setting with its variable, accepted values, default and help."""
    words = _helps()
    return tuple(
        Setting(
            name=f.name,
            env=ENV_PREFIX + f.name.upper(),
            accepts=_kind(f.name).words,
            default=_kind(f.name).show(f.default),
            help=words.get(f.name, ""),
            basic=f.metadata["basic"],
        )
        for f in fields(Config)
    )


@cache
def _helps() -> dict[str, str]:
    """Return the docstring of each row of the table, by the setting's name."""
    (table,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(table, ast.ClassDef)
    return {
        ast.unparse(row.target): " ".join(ast.literal_eval(words.value).split())
        for row, words in pairwise(table.body)
        if isinstance(row, ast.AnnAssign) and isinstance(words, ast.Expr)
    }


def show(name: str, value: object) -> str:
    """Return a setting's value as a file or the environment would have it."""
    return _kind(name).show(value)


def _kind(name: str) -> Kind[Any]:
    return cast("Kind[Any]", Config.__dataclass_fields__[name].metadata["kind"])


def _read(settings: Mapping[str, object], source: str) -> dict[str, Any]:
    """Return the settings in normal form; a ConfigError begins with ``source``."""
    known = [f.name for f in fields(Config)]
    read = {}
    for name, value in settings.items():
        if name in REMOVED:
            raise ConfigError(f"{source}: {name} was removed: {REMOVED[name]}")
        if name not in known:
            near = nearest(str(name), known) or "; kvferry config --all lists the settings"
            raise ConfigError(f"{source}: there is no setting {quoted(name)}{near}")
        try:
            read[name] = _kind(name).read(name, value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    return read


def _read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a file, from its table ``kvferry`` if it has one."""
    path = Path(path)
    where, suffix = _plain(str(path), _LONGEST_PATH), path.suffix.lower()
    if suffix not in (".toml", ".json"):
        raise ConfigError(f"{where}: a configuration file ends in .toml or .json")
    text = read_file(path, f"{where}:", _MOST_FILE_BYTES)
    try:
        parse: Callable[[str], object] = tomllib.loads if suffix == ".toml" else json.loads
        data = parse(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or a parser's error
        words = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{where}: not valid {suffix[1:].upper()}: {words}") from None
    if isinstance(data, dict) and "kvferry" in data:
        data = data["kvferry"]
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a table of settings, got {shown(data)}")
    return _read(data, where)
