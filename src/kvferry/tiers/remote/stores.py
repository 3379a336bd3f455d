"""Opens buckets: finds addresses and credentials as each cloud's own tools do, and words errors.

Requests to another host than the address names are refused: a server that redirects would receive
the session token. obstore cannot be told not to follow redirects, so it gets a proxy that does not
exist, for all hosts but those. If the environment names a proxy, that one is used.
"""

from __future__ import annotations

import configparser
import html
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvferry.errors import ConfigError
from kvferry.settings.tiers import AZURE, FILES, GOOGLE, S3, RemoteAddress
from kvferry.tiers.remote.client import hide, shown

REQUEST_SECONDS = 60.0
_NOWHERE = "http://127.0.0.1:1"
_LINK_LOCAL = ("169.254.0.0/16", "fd00:ec2::/32")
"""Addresses from which machines in clouds get credentials."""
_OWN_HOSTS = {
    S3: ("amazonaws.com", "amazonaws.com.cn"),
    GOOGLE: ("googleapis.com", "metadata.google.internal", "metadata"),
    AZURE: (
        *("windows.net", "microsoftonline.com", "usgovcloudapi.net", "microsoftonline.us"),
        *("chinacloudapi.cn", "partner.microsoftonline.cn"),
    ),
}
_HOST_VARIABLES = {
    S3: (
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "AWS_ENDPOINT_URL_STS",
    ),
    GOOGLE: ("GOOGLE_BASE_URL",),
    AZURE: ("AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "MSI_ENDPOINT"),
}
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")

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
_SECRETS = ("access_key_id", "secret_access_key", "session_token", "account_key", "sas_key")
_AZURE_ENV = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": (
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
        "AZURE_STORAGE_MASTER_KEY",
    ),
    "sas_key": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_OF_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_CREDENTIAL_VARIABLES = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
"""Variables by which the client finds keys itself: all of one line are needed. The last are for EKS
Pod Identity; without the token's file obstore 0.12 does not ask there."""

DEFAULT_REGION = "us-east-1"

_SAID = re.compile(r"Error performing (\w+) \S+ in .*? - (.*)")
_STATUS = re.compile(r"Server returned non-2xx status code: ([^<]*?):? ?(<.*)?")
_CODE, _MESSAGE = (re.compile(rf"<{tag}>(.*?)</{tag}>") for tag in ("Code", "Message"))
_TAG = re.compile(r"<[^>]*>?")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_NOWHERE_FOUND = re.compile(r"ConnectError\([^)]*\s127\.0\.0\.1:1,")
_SYSTEM = re.compile(r'message: "([^"]+)"')
_CERTIFICATES = {
    "UnknownIssuer": "is not signed by a trusted authority; AWS_CA_BUNDLE names a file of those",
    "Expired": "is out of date, or our clock is wrong",
    "NotValidYet": "is not valid yet, or our clock is wrong",
    "NotValidForName": "names another server",
}


def open_bucket(address: RemoteAddress, env: Mapping[str, str]) -> Any:
    """Return the bucket of an address, without a request. ConfigError without credentials."""
    if address.kind == FILES:
        return LocalStore()
    make, config_of = _BUCKETS[address.kind]
    config = config_of(address.options, env)
    if address.kind == S3:  # blocks have a checksum of their own: a second one gains nothing
        config["unsigned_payload"] = "true"
    for name, value in config.items():
        if name in _SECRETS and value:
            hide(value)
    endpoint = config.get("endpoint") or config.get("base_url") or ""
    urls = [endpoint, *(env.get(name, "") for name in _HOST_VARIABLES[address.kind])]
    options: dict[str, Any] = {
        "allow_http": any(url.startswith("http://") for url in urls),
        "connect_timeout": timedelta(seconds=2),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "pool_idle_timeout": timedelta(seconds=30),
    }
    if address.kind == S3 and (roots := ca_bundle(env)):
        options["root_certificate"] = roots
    if not any(env.get(name) or env.get(name.lower()) for name in _PROXIES):
        hosts = [urlsplit(url).hostname or "" for url in urls if url]
        hosts += [*_OWN_HOSTS[address.kind], *_LINK_LOCAL]
        options |= {"proxy_url": _NOWHERE, "proxy_excludes": ",".join(hosts)}
    return make(
        address.place,
        config=cast(Any, config),
        client_options=cast(Any, options),
        retry_config={
            "max_retries": 3,
            "retry_timeout": timedelta(seconds=30),
            "backoff": {
                "base": 2,
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
            },
        },
    )


class WrongSizeError(Exception):
    """An object has a size that none of ours has."""

    def __init__(self, size: int) -> None:
        super().__init__(f"an object has {size} bytes, which none of ours has")


async def read_object(store: Any, path: str, fits: range) -> memoryview:
    """Return an object whose size is in ``fits``, else raise WrongSizeError; read no more of it."""
    got = await obstore.get_async(store, path)
    size = got.meta["size"]
    if size not in fits:
        raise WrongSizeError(size)
    if isinstance(store, LocalStore):  # streaming it would yield pieces of 8 KiB
        return memoryview(await got.bytes_async())
    # The first piece is longer than ``size`` only if the object is.
    piece = await anext(aiter(got.stream(min_chunk_size=size + 1)), b"")
    if len(piece) != size:
        raise WrongSizeError(len(piece))
    return memoryview(piece)


def s3_config(told: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the address, else the environment, else the profile in ``~/.aws``.

    Keys from two sources are never mixed. The client itself finds other credentials (an instance's
    role, a container's, a web identity).
    """
    found = _from(env, _OF_ENV)
    profile = _profile(env)
    has_means = any(all(env.get(name) for name in names) for names in _CREDENTIAL_VARIABLES)
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


def _from(env: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return each setting that the environment has, by the first of its variables that is set."""
    return {
        name: value
        for name, variables in names.items()
        if (value := next((env[each] for each in variables if env.get(each)), ""))
    }


def google_config(told: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the client's settings. It finds credentials itself, as Google's own libraries do.

    ``GOOGLE_APPLICATION_CREDENTIALS``, the login of ``gcloud``, or the machine's service account.
    """
    endpoint = told.get("endpoint") or env.get("GOOGLE_BASE_URL")
    return {"base_url": endpoint} if endpoint else {}


def azure_config(told: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the address, else the environment, else its connection string.

    The client itself finds a service principal, a workload's or a managed identity.
    """
    found = _from(env, _AZURE_ENV)
    for part in env.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";"):
        name, _, value = part.partition("=")
        if name in _OF_CONNECTION:
            found.setdefault(_OF_CONNECTION[name], value)
    if "account" in told:
        found["account_name"] = told["account"]
    if "endpoint" in told:
        found["endpoint"] = told["endpoint"]
    if "account_name" not in found:
        raise ConfigError(
            "which storage account is not known: give ?account=NAME in the address, or "
            "AZURE_STORAGE_ACCOUNT"
        )
    return found


def ca_bundle(env: Mapping[str, str]) -> bytes | None:
    """Return certificates to trust besides the system's: ``AWS_CA_BUNDLE``'s or a profile's."""
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
            continue  # treated as missing: the store will refuse access
        for place in (section, name):  # [default] in both files, [profile x] in the first
            if parser.has_section(place):
                table = parser[place]
                found.update({k: table[v] for k, v in _OF_PROFILE.items() if table.get(v)})
    return found


_Config = Callable[[Mapping[str, str], Mapping[str, str]], dict[str, str]]
_BUCKETS: dict[str, tuple[Callable[..., Any], _Config]] = {
    S3: (S3Store, s3_config),
    GOOGLE: (GCSStore, google_config),
    AZURE: (AzureStore, azure_config),
}


def reason_of(error: Exception) -> str:
    """Return the words of the server or the system, without the object's long name."""
    said, _, inner = str(error).partition("\n\nDebug source")
    text = " ".join(said.split())
    found = _SAID.search(text)
    if found:
        text = f"{found[1]}: {_answer(found[2])}"
    certificate, system = _CERTIFICATE.search(inner), _SYSTEM.search(inner)
    if certificate:
        kind = certificate[1].removesuffix("Context")
        text = f"its certificate {_CERTIFICATES.get(kind, f'is not valid: {kind}')}"
    elif _NO_TLS.search(inner):
        text = "what answers there does not speak https; is its endpoint http://...?"
    elif _NOWHERE_FOUND.search(inner):
        text = "it sends us on to another host, which is not followed; name that in the address"
    elif system and system[1] not in text:
        text = f"{text}: {system[1]}"
    return shown(text) or type(error).__name__


def _answer(said: str) -> str:
    """Return a server's answer: its status, and the text of its XML or HTML."""
    found = _STATUS.fullmatch(said)
    if found is None:
        return said
    status, body = found[1], found[2] or ""
    parts = [match[1] for tag in (_CODE, _MESSAGE) if (match := tag.search(body))]
    words = html.unescape(": ".join(parts) or _TAG.sub(" ", body))
    return ": ".join(filter(None, (status, " ".join(words.split()))))
