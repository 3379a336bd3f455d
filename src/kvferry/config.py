"""Every setting of kvferry: its name, its default, what it accepts and what it does.

A setting is one line in :class:`Config`; its reading, its refusals, its environment variable and
its line in :func:`describe` follow from that line. Whichever door a value comes through (arguments,
a dict, a file, the environment), the same reader checks it.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from kvferry.copy_paths import AUTO_PATH, BY_NAME
from kvferry.errors import ConfigError, UnknownSettingError
from kvferry.level_kinds import LevelSpec, read_levels, show_levels
from kvferry.policy_kinds import ACCEPTS, DEFAULT_POLICY, read_policy
from kvferry.quantities import (
    GiB,
    MiB,
    format_size,
    parse_count,
    parse_rate,
    parse_seconds,
    parse_size,
    quoted,
    shown,
)
from kvferry.settings_file import read_table

ENV_PREFIX = "KVFERRY_"
CONFIG_FILE_ENV = "KVFERRY_CONFIG"
"""Names the file to read where no file is given."""

# The file's name, the debug switch of the copies, our tests' own switches.
_NOT_A_SETTING = re.compile(r"KVFERRY_(CONFIG$|DEBUG$|TEST_)")

# What Kubernetes puts into every pod for each service of its namespace: beside one that is called
# kvferry-metrics, KVFERRY_METRICS_PORT is tcp://10.0.0.1:9475 and no setting of ours.
_SERVICE_LINK = re.compile(
    r"KVFERRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

_LONGEST_NAME = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a setting accepts: in words, how it is read, how a value is shown."""

    words: str
    read: Callable[[str, object], T]
    show: Callable[[T], str] = str


class Auto(Enum):
    """A value to be found by looking at the machine."""

    AUTO = "auto"


AUTO = Auto.AUTO


SIZE = Kind("size", lambda name, value: parse_size(value, name=name), format_size)
SECONDS = Kind("seconds", lambda name, value: parse_seconds(value, name=name), "{:g}s".format)
RATE = Kind("number", lambda name, value: parse_rate(value, name=name), "{:g}".format)
COUNT = Kind("count", lambda name, value: parse_count(value, name=name))


PORT = Kind("port", lambda name, value: parse_count(value, name=name, maximum=65535))

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


def _read_address(name: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if not _HOST_NAME.fullmatch(text) and not _is_ipv6(text):
        raise ConfigError(
            f"{name}: expected an address such as 127.0.0.1 or ::1, got {shown(value)}"
        )
    return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return text.isascii() and text.isprintable()


ADDRESS = Kind("address", _read_address)
LEVELS = Kind("KIND:OPTIONS, ...|none", read_levels, show_levels)
POLICY = Kind(ACCEPTS, read_policy)


def one_of(*choices: str) -> Kind[str]:
    """One of a few words, whatever their case."""

    def read(name: str, value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) and value.isascii() else None
        if word not in choices:
            near = _nearest(word or "", choices)
            raise ConfigError(
                f"{name}: expected one of {', '.join(choices)}, got {shown(value)}{near}"
            )
        return word

    return Kind("|".join(choices), read)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """The same, or None; files and the environment write None as "none"."""

    def read(name: str, value: object) -> T | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        return kind.read(name, value)

    def show(value: T | None) -> str:
        return "none" if value is None else kind.show(value)

    return Kind(f"{kind.words}|none", read, show)


def or_auto(kind: Kind[T]) -> Kind[T | Auto]:
    """The same, or "auto": found by looking at the machine."""

    def read(name: str, value: object) -> T | Auto:
        if value is AUTO or (isinstance(value, str) and value.strip().lower() == AUTO.value):
            return AUTO
        return kind.read(name, value)

    def show(value: T | Auto) -> str:
        return AUTO.value if isinstance(value, Auto) else kind.show(value)

    return Kind(f"{kind.words}|auto", read, show)


def setting(default: T, kind: Kind[T], help: str) -> T:
    """One field of :class:`Config`."""
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, checked and in normal form: sizes in bytes, times in seconds.

    Owns what may be said, not what is done with it. Frozen; ``dataclasses.replace`` checks again.
    """

    host: int | Auto = setting(  # noqa: RUF009
        1 * GiB,
        or_auto(SIZE),
        "Host memory that holds blocks, for each rank; auto: most of what this machine has left.",
    )
    host_pin: str = setting(
        "auto",
        one_of("auto", "required", "never"),
        "Pin host memory: if the driver lets us, or refuse to start without, or do not.",
    )
    levels: tuple[LevelSpec, ...] = setting(
        (),
        LEVELS,
        "What lies below host memory, nearest first: memory:SIZE or memory-by-key:SIZE (ordinary "
        "memory, for each rank), or package.module:factory of your own.",
    )
    level_write: str = setting(
        "spill",
        one_of("spill", "through"),
        "Copy blocks to the levels when host memory is about to drop them, or as soon as stored.",
    )
    policy: str = setting(
        DEFAULT_POLICY,
        POLICY,
        "Which blocks make room for others, in host memory and in every level with places.",
    )
    block_tokens: int = setting(16, COUNT, "Tokens in one block.")
    copy_path: str = setting(
        AUTO_PATH,
        one_of(AUTO_PATH, *BY_NAME),
        "How blocks are copied; auto picks by measurement on this machine.",
    )
    staging_ring: int = setting(64 * MiB, SIZE, "Device memory of the staged path's ring.")
    load_deadline: float = setting(30.0, SECONDS, "A load not finished by then is given up.")
    store_deadline: float = setting(30.0, SECONDS, "A store not finished by then is given up.")
    match_deadline: float = setting(60.0, SECONDS, "A hit not loaded by then is let go.")
    promote_deadline: float = setting(
        10.0, SECONDS, "A fetch from a lower tier not finished by then is given up."
    )
    ask_deadline: float = setting(
        1.0, SECONDS, "A lower tier that has not said by then what it has counts as having nothing."
    )
    store_mode: str = setting(
        "eager",
        one_of("eager", "lazy"),
        "Store blocks as soon as they are computed, or only when the device is about to drop them.",
    )
    store_after: int = setting(
        1, COUNT, "Store a block only once requests have asked for it this often."
    )
    load_policy: str = setting(
        "auto",
        one_of("always", "auto", "never"),
        "Load hits always, never, or only where that is expected to beat computing them.",
    )
    prefill_rate: float | None = setting(
        None, optional(RATE), "Tokens per second the engine computes; none: learned from it."
    )
    max_loading_blocks: int | None = setting(
        None,
        optional(COUNT),
        "Device blocks that loads may hold at one time; none: half of the device's.",
    )
    max_storing_blocks: int | None = setting(
        None,
        optional(COUNT),
        "Device blocks that stores may hold at one time; none: a quarter of the device's.",
    )
    max_bytes_in_flight: int = setting(
        4 * GiB, SIZE, "Bytes on their way at one time; stores wait first."
    )
    metrics_port: int | None = setting(
        None,
        optional(PORT),
        "Serve metrics and explanations on this port; none: do not serve them.",
    )
    metrics_host: str = setting(
        "127.0.0.1", ADDRESS, "The address to serve them on; others than loopback can be reached."
    )
    log_level: str = setting(
        "warning", one_of("debug", "info", "warning", "error", "critical"), "What is logged."
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _kind(f.name).read(f.name, getattr(self, f.name)))

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Config:
        """From names and values; refuses a name we do not have."""
        return cls(**_read(settings, "settings"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """From a ``.toml`` or ``.json`` file: its table ``kvferry`` if it has one."""
        return cls(**_read_file(path))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """From ``KVFERRY_HOST`` and its like; an empty variable counts as not set."""
        return cls(**_read_env(os.environ if env is None else env))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        overrides: Mapping[str, object] | None = None,
    ) -> Config:
        """From everywhere: overrides, then the environment, then the file, then the defaults.

        Without ``path`` the file is the one ``KVFERRY_CONFIG`` names, if any. An override of None
        was not given (as a command line leaves it); "none" sets None.
        """
        env = os.environ if env is None else env
        path = path if path is not None else env.get(CONFIG_FILE_ENV) or None
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        layers = [
            _read_file(path) if path is not None else {},
            _read_env(env),
            _read(given, "overrides"),
        ]
        return cls(**{name: value for layer in layers for name, value in layer.items()})


@dataclass(frozen=True)
class Setting:
    """One setting, described for people: everything is text."""

    name: str
    env: str
    accepts: str
    default: str
    help: str

    def __str__(self) -> str:
        return f"{self.name} = {self.default}  ({self.accepts}; {self.env})  {self.help}"


def describe() -> tuple[Setting, ...]:
    """Every setting with its variable, what it accepts, its default and what it does."""
    return tuple(
        Setting(
            name=f.name,
            env=ENV_PREFIX + f.name.upper(),
            accepts=_kind(f.name).words,
            default=_kind(f.name).show(f.default),
            help=f.metadata["help"],
        )
        for f in fields(Config)
    )


def show(name: str, value: object) -> str:
    """A setting's value as a file or the environment would write it."""
    return _kind(name).show(value)


def _kind(name: str) -> Kind[Any]:
    return cast("Kind[Any]", Config.__dataclass_fields__[name].metadata["kind"])


def _read(settings: Mapping[str, object], where: str) -> dict[str, Any]:
    """The settings in normal form; an error says ``where`` they came from."""
    known = [f.name for f in fields(Config)]
    read = {}
    for name, value in settings.items():
        if name not in known:
            raise UnknownSettingError(
                f"{where}: there is no setting {quoted(name)}{_nearest(str(name), known)}; "
                f"settings: {', '.join(known)}"
            )
        try:
            read[name] = _kind(name).read(name, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return read


def is_setting(name: str, value: str) -> bool:
    """Whether an environment variable says something about a setting of ours."""
    if not name.startswith(ENV_PREFIX) or not value.strip() or _NOT_A_SETTING.match(name):
        return False
    is_url = name.endswith("PORT") and _SERVICE_URL.match(value.strip())
    return not is_url and not _SERVICE_LINK.match(name)


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Which environment variable sets which setting, by the setting's name."""
    found: dict[str, str] = {}
    for variable, value in env.items():
        if is_setting(variable, value):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in found:
                raise ConfigError(
                    f"environment: {quoted(found[name])} and {quoted(variable)} are one setting "
                    "spelt in two ways; unset one of them"
                )
            found[name] = variable
    return found


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    given = {name: env[variable] for name, variable in variables(env).items()}
    return _read(given, f"environment ({ENV_PREFIX}*)")


def _read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    where, table = read_table(path)
    return _read(table, where)


def _nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
