"""A file of settings, TOML or JSON: read with bounds, refused with its name and what is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvferry.core.quantities import MiB, format_size, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.disk import KEY_ENV
from kvferry.settings.remote import REMOTE_KEY_ENV

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_FILE_BYTES = 1 * MiB
_LONGEST_PATH = 300


def read_table(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The file's name for messages, and its names and values: its table ``kvferry`` if it has one.

    ConfigError where it cannot be read, is too large, is not of its kind, or says a name twice.
    """
    path = Path(path)
    where, suffix = _plain(path), path.suffix.lower()
    parsers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": _parse_json}
    if suffix not in parsers:
        raise ConfigError(f"{where}: a configuration file ends in .toml or .json")
    text = _file_text(path, where)
    try:
        data = parsers[suffix](text)
    except ValueError as error:  # both parsers' errors
        raise ConfigError(f"{where}: not valid {suffix[1:].upper()}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: not valid {suffix[1:].upper()}: nested too deep") from None
    if isinstance(data, dict) and "kvferry" in data:
        data = data["kvferry"]
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a table of settings, got {shown(data)}")
    return where, data


def _file_text(path: Path, where: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise ConfigError(f"{where}: cannot be read: it is no file")
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in its name
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    if len(content) > _MOST_FILE_BYTES:
        raise ConfigError(f"{where}: it has more than {format_size(_MOST_FILE_BYTES)}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = path.suffix.lower()[1:].upper()
        raise ConfigError(f"{where}: not valid {kind}: {error}") from error


def _plain(path: Path) -> str:
    """A file's name in a message, as it is, unless it is made of something else."""
    name = str(path)
    return name if name.isprintable() and len(name) <= _LONGEST_PATH else quoted(name)


def _parse_json(text: str) -> object:
    """As TOML does it: a name that is there twice is an error, not the last one's."""
    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = Counter(name for name, _ in pairs)
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"{quoted(name)} is there twice")
    return dict(pairs)


# ------------------------------------------------------------------------------------------------
# Which environment variables are settings of ours, and which only begin like one.

ENV_PREFIX = "KVFERRY_"

# The file's name, the keys to encrypt with, the copies' debug switch, our tests' own switches.
_NOT_A_SETTING = re.compile(rf"({KEY_ENV}|{REMOTE_KEY_ENV})$|KVFERRY_(CONFIG$|DEBUG$|TEST_)")

# What Kubernetes puts into every pod for each service of its namespace: beside one that is called
# kvferry-metrics, KVFERRY_METRICS_PORT is tcp://10.0.0.1:9475 and no setting of ours.
_SERVICE_LINK = re.compile(
    r"KVFERRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


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
