"""S3 and what speaks like it: objects of one or more blocks, many requests at once.

Servers differ. Some honour a conditional put, some ignore it and overwrite, some refuse it; some
answer a missing bucket as a missing object. Nothing here rests on that: an object is verified when
it is read, and a server that overwrites it writes the same bytes, of as many blocks or of another
number that end with the same one. Where the condition is ignored a shorter object may so replace a
longer one; the blocks that it lacks are missing until a server writes them again.
"""

from __future__ import annotations

import asyncio
import configparser
import html
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import obstore
from obstore import exceptions
from obstore.store import S3Store

from kvferry.errors import ConfigError
from kvferry.settings.tiers import PACK, RemoteAddress
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault, Fetched, Foreign, Staging, Unavailable
from kvferry.tiers.remote.objects import most_in_one

_CALLS, _MOST_CALLS, FIND_CALLS = 32, 64, 128
_ENOUGH_BYTES, _MOST_BYTES = 32 << 20, 256 << 20
"""Bytes in flight each way: as many keep a store busy that is some 20 ms away; and the most."""

_REQUEST_SECONDS = 60.0
_PROBE = b"kvferry was here"

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
"""Variables by which the client finds keys itself: all of one line. The last are for EKS Pod
Identity; without the token's file obstore 0.12 does not ask there."""

DEFAULT_REGION = "us-east-1"

_LONGEST = 300
_SAID = re.compile(r"Error performing (\w+) \S+ in .*? - (.*)")
_STATUS = re.compile(r"Server returned non-2xx status code: ([^<]*?):? ?(<.*)?")
_CODE, _MESSAGE = (re.compile(rf"<{tag}>(.*?)</{tag}>") for tag in ("Code", "Message"))
_TAG = re.compile(r"<[^>]*>?")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_SYSTEM = re.compile(r'message: "([^"]+)"')
_CERTIFICATES = {
    "UnknownIssuer": "is not signed by a trusted authority; AWS_CA_BUNDLE names a file of those",
    "Expired": "is out of date, or our clock is wrong",
    "NotValidYet": "is not valid yet, or our clock is wrong",
    "NotValidForName": "names another server",
}


def most_calls(object_bytes: int) -> int:
    """How many requests of one kind are best in flight: the smaller the objects, the more."""
    enough = min(max(_CALLS, _ENOUGH_BYTES // object_bytes), _MOST_CALLS)
    return max(4, min(enough, _MOST_BYTES // object_bytes))


class S3Client:
    """Objects of one bucket. Owns the connections.

    Requests that fail for a moment are sent again by the client below, later and later, with
    jitter; the batch's deadline ends that.
    """

    def __init__(
        self,
        address: RemoteAddress,
        object_bytes: int,
        folder: str,
        env: Mapping[str, str],
        blocks_per_object: int = 1,
    ) -> None:
        """``object_bytes`` has a block with its seal."""
        told = {name: value for name, value in address.options.items() if name != PACK}
        config = s3_config(told, env)
        roots = ca_bundle(env)
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._probe_name = f"{self._prefix}{folder}/probe"
        self._can_create = True
        self._object_bytes = object_bytes
        room = blocks_per_object * object_bytes
        self.num_calls = min(most_calls(object_bytes), max(4, _MOST_BYTES // room))
        self.blocks_per_object = blocks_per_object
        self.staging = Staging(room, 2 * self.num_calls)
        self._store = S3Store(
            address.place,
            # Blocks have a checksum of their own: a second, slower one gains nothing.
            config=cast(Any, {**config, "unsigned_payload": "true"}),
            client_options={
                **cast(Any, {"root_certificate": roots} if roots else {}),
                "allow_http": config.get("endpoint", "").startswith("http://"),
                "connect_timeout": timedelta(seconds=2),
                "timeout": timedelta(seconds=_REQUEST_SECONDS),
                "pool_idle_timeout": timedelta(seconds=30),
            },
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

    def names_per_call(self, way: Way) -> int:
        """Lookups are short: as many are in flight as allowed."""
        return max(1, FIND_CALLS // self.num_calls) if way is Way.FIND else 1

    async def probe(self) -> Fault | None:
        """Write a small object and read it back."""
        try:
            await self._put(self._probe_name, _PROBE, "overwrite")
            got = await obstore.get_async(self._store, self._probe_name)
            if bytes(await got.bytes_async()) != _PROBE:
                return Fault("what it was given it does not give back")
        except Exception as error:  # for any reason, the store cannot be used
            return Fault(reason_of(error))
        return None

    async def find(self, names: Sequence[str], size: int) -> list[int | Unavailable | Fault]:
        return list(await asyncio.gather(*(self._find(name, size) for name in names)))

    async def _find(self, name: str, size: int) -> int | Unavailable | Fault:
        try:
            there = await obstore.head_async(self._store, self._prefix + name)
        except FileNotFoundError:
            return Unavailable()
        except Exception as error:
            return Fault(reason_of(error))
        return _num_blocks(there["size"], size) or Foreign(_wrong(there["size"], size))

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview] = ()
    ) -> list[Fetched]:
        return list(await asyncio.gather(*(self._get(name, size) for name in names)))

    async def _get(self, name: str, size: int) -> Fetched:
        try:
            got = await obstore.get_async(self._store, self._prefix + name)
            if not _num_blocks(got.meta["size"], size):  # before its body, which may be anything
                return Foreign(_wrong(got.meta["size"], size))
            return memoryview(await got.bytes_async())
        except FileNotFoundError:
            return Unavailable("holds nothing")
        except Exception as error:
            return Fault(reason_of(error))

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        try:
            ends = await asyncio.gather(*map(self._put_one, names, objects, replace))
        except asyncio.CancelledError:
            # The request may go on reading them below, for as long as a request may take.
            asyncio.get_running_loop().call_later(_REQUEST_SECONDS, self._give_back, objects)
            raise
        self._give_back(objects)
        return list(ends)

    def _give_back(self, objects: Sequence[memoryview]) -> None:
        for each in objects:
            self.staging.give_back(each)

    async def _put_one(
        self, name: str, stored: memoryview, replace: bool
    ) -> Unavailable | Fault | None:
        try:
            if self._can_create and not replace:
                try:
                    await self._put(self._prefix + name, stored, "create")
                    return None
                except exceptions.AlreadyExistsError:
                    # By this or another server: the same bytes, but maybe of fewer blocks.
                    if not await self._is_shorter(name, len(stored)):
                        return None
                except (exceptions.NotSupportedError, NotImplementedError):
                    self._can_create = False
            await self._put(self._prefix + name, stored, "overwrite")
        except Exception as error:
            return Fault(reason_of(error))
        return None

    async def _is_shorter(self, name: str, size: int) -> bool:
        """Whether what is there has fewer bytes; an object of one block need not be asked."""
        if size <= self._object_bytes:
            return False
        try:
            there = await obstore.head_async(self._store, self._prefix + name)
        except FileNotFoundError:  # removed since it was in our way
            return True
        return int(there["size"]) < size

    async def _put(self, path: str, stored: Any, mode: Any) -> None:
        await obstore.put_async(self._store, path, stored, mode=mode, use_multipart=False)

    async def forget(self, folder: str) -> None:
        async for page in obstore.list(self._store, prefix=self._prefix + folder):
            await obstore.delete_async(self._store, [each["path"] for each in page])

    def close(self) -> None:
        """Connections end with the process."""


def _num_blocks(num_bytes: int, size: int) -> int:
    """How many blocks of this size an object of ours has; 0: it cannot be one of ours."""
    count, rest = divmod(num_bytes, size)
    return count if not rest and count <= most_in_one(size) else 0


def _wrong(got: int, wanted: int) -> str:
    return f"{got} bytes are there where {wanted} should be, or a few times as many"


def s3_config(told: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The client's settings: of the address, else the environment, else the profile in ``~/.aws``.

    Keys from two sources are never mixed. The client itself finds what none of them has (an
    instance's role, a container's, a web identity).
    """
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


def reason_of(error: Exception) -> str:
    """The words of the server or the system, without the object's long name."""
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
    elif system and system[1] not in text:
        text = f"{text}: {system[1]}"
    return text[:_LONGEST] or type(error).__name__


def _answer(said: str) -> str:
    """A server's answer: its status, and the words of its XML or HTML."""
    found = _STATUS.fullmatch(said)
    if found is None:
        return said
    status, body = found[1], found[2] or ""
    parts = [match[1] for tag in (_CODE, _MESSAGE) if (match := tag.search(body))]
    words = html.unescape(": ".join(parts) or _TAG.sub(" ", body))
    return ": ".join(filter(None, (status, " ".join(words.split()))))
