"""Which environment variables are settings of ours, and which only begin like one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvferry.disk_settings import KEY_ENV
from kvferry.errors import ConfigError
from kvferry.quantities import quoted
from kvferry.remote_settings import REMOTE_KEY_ENV

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
