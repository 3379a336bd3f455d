"""Credentials, region and endpoint of S3, found where every tool of AWS looks for them.

First what the address says, then the environment, then the profile in ``~/.aws``. What none of them
has (an instance's role, a container's, a web identity) the client finds by itself.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError

_OF_ENV = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
_OF_PROFILE = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region",
    "endpoint": "endpoint_url",
    "ca_bundle": "ca_bundle",
}
_SECRETS = ("access_key_id", "secret_access_key", "session_token")
_OTHER_MEANS = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
"""Variables by which the client finds keys itself: all of a line. (The last are EKS Pod Identity's;
without the token's file obstore 0.12 does not ask there.)"""

DEFAULT_REGION = "us-east-1"


def s3_config(told: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The client's settings. Keys from one source are never mixed with those of another."""
    found = {
        name: value
        for name, variables in _OF_ENV.items()
        if (value := next((env[each] for each in variables if env.get(each)), ""))
    }
    profile = _profile(env)
    has_means = any(all(env.get(name) for name in names) for names in _OTHER_MEANS)
    has_keys = "access_key_id" in found or has_means
    for name, value in profile.items():
        if name != "ca_bundle" and not (has_keys and name in _SECRETS):
            found.setdefault(name, value)
    found.update(told)
    found.setdefault("region", DEFAULT_REGION)
    is_known = "access_key_id" in found or has_keys
    if not is_known and env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise ConfigError(
            "there are no credentials for S3: give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a "
            "profile in ~/.aws, or let the instance's role be asked (AWS_EC2_METADATA_DISABLED)"
        )
    return found


def ca_bundle(env: Mapping[str, str]) -> bytes | None:
    """Certificates to trust besides the system's, where ``AWS_CA_BUNDLE`` or a profile has some."""
    path = env.get("AWS_CA_BUNDLE") or _profile(env).get("ca_bundle")
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"AWS_CA_BUNDLE (or ca_bundle in ~/.aws/config): {error}; name a file of certificates "
            "in PEM, or none"
        ) from error


def _profile(env: Mapping[str, str]) -> dict[str, str]:
    home = Path(env.get("HOME") or os.path.expanduser("~"), ".aws")
    name = env.get("AWS_PROFILE") or "default"
    files = (
        (env.get("AWS_CONFIG_FILE") or home / "config", f"profile {name}"),
        (env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", name),
    )
    found: dict[str, str] = {}
    for path, section in files:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # as if it were not there: the store will say that we may not
        for place in (section, name):  # [default] in both files, [profile x] in the first
            if parser.has_section(place):
                table = parser[place]
                found.update({k: table[v] for k, v in _OF_PROFILE.items() if table.get(v)})
    return found
