"""S3 and what speaks like it: objects of one or more blocks, many requests at once.

Servers differ. Some honour a conditional put, some ignore it and overwrite, some refuse it; some
answer a missing bucket as a missing object. Nothing here rests on that: an object proves itself
when it is read, and whoever overwrites writes the same bytes: of as many blocks, or of another
number of those that end with the same one. Where the server ignores the condition a shorter object
may so take the place of a longer; what it lacks is missing until somebody writes it again.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import obstore
from obstore import exceptions
from obstore.store import S3Store

from kvferry.settings.remote import PACK, RemoteAddress
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.aws import ca_bundle, s3_config
from kvferry.tiers.remote.client import Fault, NotOurs, NotThere, Stored
from kvferry.tiers.remote.objects import most_in_one
from kvferry.tiers.remote.window import Staging

_LONGEST = 300
_SAID = re.compile(r"Error performing (\w+) \S+ in .*? - (.*)")
_STATUS = re.compile(r"Server returned non-2xx status code: ([^<]*?):? ?(<.*)?")
_CODE, _MESSAGE = (re.compile(rf"<{tag}>(.*?)</{tag}>") for tag in ("Code", "Message"))
_TAG = re.compile(r"<[^>]*>?")
_NO_TLS = re.compile(r"InvalidMessage\(\s*InvalidContentType")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_SYSTEM = re.compile(r'message: "([^"]+)"')
_CERTIFICATES = {
    "UnknownIssuer": "is signed by nobody whom we trust; AWS_CA_BUNDLE names a file of those",
    "Expired": "is out of date, or our clock is wrong",
    "NotValidYet": "is not valid yet, or our clock is wrong",
    "NotValidForName": "names another server",
}


def reason_of(error: Exception) -> str:
    """What the server or the system said, without the object's long name."""
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
    """A server's answer: its status, and of what it says in XML or HTML the words."""
    found = _STATUS.fullmatch(said)
    if found is None:
        return said
    status, body = found[1], found[2] or ""
    parts = [match[1] for tag in (_CODE, _MESSAGE) if (match := tag.search(body))]
    words = html.unescape(": ".join(parts) or _TAG.sub(" ", body))
    return ": ".join(filter(None, (status, " ".join(words.split()))))


# ------------------------------------------------------------------------------------------------
# S3 and what speaks like it: objects of one or more blocks, many requests at once.
#
# Servers differ. Some honour a conditional put, some ignore it and overwrite, some refuse it; some
# answer a missing bucket as a missing object. Nothing here rests on that: an object proves itself
# when it is read, and whoever overwrites writes the same bytes: of as many blocks, or of another
# number of those that end with the same one. Where the server ignores the condition a shorter
# object
# may so take the place of a longer; what it lacks is missing until somebody writes it again.

_CALLS, _MOST_CALLS, FIND_CALLS = 32, 64, 128
_ENOUGH_BYTES, _MOST_BYTES = 32 << 20, 256 << 20
"""Objects under way one way: this much keeps a store busy that is some 20 ms away; and the most."""

_REQUEST_SECONDS = 60.0
_PROBE = b"kvferry was here"


def most_calls(object_bytes: int) -> int:
    """How many requests of one kind are best under way: the smaller objects are, the more."""
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
            # Blocks carry a checksum of their own: a second over each, slower one gains nothing.
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
        """Look-ups are short, so as many are under way as may be."""
        return max(1, FIND_CALLS // self.num_calls) if way is Way.FIND else 1

    async def probe(self) -> Fault | None:
        """Write a small object and read it back."""
        try:
            await self._put(self._probe_name, _PROBE, "overwrite")
            got = await obstore.get_async(self._store, self._probe_name)
            if bytes(await got.bytes_async()) != _PROBE:
                return Fault("what it was given it does not give back")
        except Exception as error:  # whatever it is, the store cannot be used
            return Fault(reason_of(error))
        return None

    async def find(self, names: Sequence[str], size: int) -> list[int | NotThere | Fault]:
        return list(await asyncio.gather(*(self._find(name, size) for name in names)))

    async def _find(self, name: str, size: int) -> int | NotThere | Fault:
        try:
            there = await obstore.head_async(self._store, self._prefix + name)
        except FileNotFoundError:
            return NotThere()
        except Exception as error:
            return Fault(reason_of(error))
        return _num_blocks(there["size"], size) or NotOurs(_wrong(there["size"], size))

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview] = ()
    ) -> list[Stored]:
        return list(await asyncio.gather(*(self._get(name, size) for name in names)))

    async def _get(self, name: str, size: int) -> Stored:
        try:
            got = await obstore.get_async(self._store, self._prefix + name)
            if not _num_blocks(got.meta["size"], size):  # before its body, which may be anything
                return NotOurs(_wrong(got.meta["size"], size))
            return memoryview(await got.bytes_async())
        except FileNotFoundError:
            return NotThere("holds nothing")
        except Exception as error:
            return Fault(reason_of(error))

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[NotThere | Fault | None]:
        try:
            ends = await asyncio.gather(*map(self._put_one, names, objects, replace))
        except asyncio.CancelledError:
            # The request may go on reading them below; no longer than a request may take.
            asyncio.get_running_loop().call_later(_REQUEST_SECONDS, self._give_back, objects)
            raise
        self._give_back(objects)
        return list(ends)

    def _give_back(self, objects: Sequence[memoryview]) -> None:
        for each in objects:
            self.staging.give_back(each)

    async def _put_one(
        self, name: str, stored: memoryview, replace: bool
    ) -> NotThere | Fault | None:
        try:
            if self._can_create and not replace:
                try:
                    await self._put(self._prefix + name, stored, "create")
                    return None
                except exceptions.AlreadyExistsError:
                    # By us or by another server: the same bytes, but maybe of fewer blocks.
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
