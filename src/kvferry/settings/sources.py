"""Settings from a TOML or JSON file and from the environment, before their values are read."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvferry.core.quantities import MiB, quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.disk import KEY_ENV
from kvferry.settings.files import read_file
from kvferry.settings.remote import REMOTE_KEY_ENV

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_FILE_BYTES = 1 * MiB
_LONGEST_PATH = 300

ENV_PREFIX = "KVFERRY_"

# The file's name, the keys to encrypt with, the copies' debug switch, the tests' own switches.
_NOT_A_SETTING = re.compile(rf"({KEY_ENV}|{REMOTE_KEY_ENV})$|KVFERRY_(CONFIG$|DEBUG$|TEST_)")

# Kubernetes puts these into every pod for each service of its namespace. Beside a service that is
# called kvferry-metrics, KVFERRY_METRICS_PORT is tcp://10.0.0.1:9475 and no setting.
_SERVICE_LINK = re.compile(
    r"KVFERRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def read_table(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The file's name for messages, and its names and values: its table ``kvferry`` if it has one.

    ConfigError where it cannot be read, is too large, is not of its kind, or says a name twice.
    """
    path = Path(path)
    where, suffix = _plain(path), path.suffix.lower()
    parsers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".json": _parse_json}
    if suffix not in parsers:
        raise ConfigError(f"{where}: a configuration file ends in .toml or .json")
    content = read_file(path, f"{where}:", _MOST_FILE_BYTES)
    try:
        data = parsers[suffix](content.decode())
    except ValueError as error:  # not UTF-8, or a parser's error
        raise ConfigError(f"{where}: not valid {suffix[1:].upper()}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: not valid {suffix[1:].upper()}: nested too deep") from None
    if isinstance(data, dict) and "kvferry" in data:
        data = data["kvferry"]
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a table of settings, got {shown(data)}")
    return where, data


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


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that sets each setting, by the setting's name.

    ConfigError where two spellings name one setting.
    """
    found: dict[str, str] = {}
    for variable, value in env.items():
        if _is_setting(variable, value):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in found:
                raise ConfigError(
                    f"environment: {quoted(found[name])} and {quoted(variable)} are one setting "
                    "spelt in two ways; unset one of them"
                )
            found[name] = variable
    return found


def _is_setting(name: str, value: str) -> bool:
    if not name.startswith(ENV_PREFIX) or not value.strip() or _NOT_A_SETTING.match(name):
        return False
    is_url = name.endswith("PORT") and _SERVICE_URL.match(value.strip())
    return not is_url and not _SERVICE_LINK.match(name)
