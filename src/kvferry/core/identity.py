"""Hash tokens to a chain of keys, equal in every process and on every machine.

::

    namespace ── fingerprint ─┐
                              ▼
    (a request's salt and extra)
                              ▼
    tokens of block 0 ─────▶ key 0 ─┐          key = blake2b(parent, tokens as int64)
                                    ▼
    tokens of block 1 ───────────▶ key 1 ─┐    so a key covers its block and all before it,
                                          ▼
    tokens of block 2 ─────────────────▶ key 2 under everything that could change the bytes

This module never uses ``hash()``, ``str(dict)`` or the machine's byte order. In doubt keys must
differ: a miss costs time, a wrong hit is a wrong answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Key, Keys, masked_key, require_key
from kvferry.core.quantities import Integers, integer, integers, quoted
from kvferry.errors import InputError

FORMAT_VERSION = 2
"""Part of every fingerprint. Raise it when the meaning of keys or of a slot's bytes changes."""

Described = str | Mapping[str, Any] | list[Any] | tuple[Any, ...]
"""Text, or plain data (numbers, text, None, lists, mappings), which has one canonical text."""

Extra = Described | bytes
"""Whatever decides the bytes of a request's blocks besides its tokens, or a digest of it."""

# The six uses of blake2b; ``person`` keeps their digests apart.
_NAMESPACE = b"kvferry.ns"
_CHAIN = b"kvferry.chain"
_REQUEST = b"kvferry.request"
_ADOPT = b"kvferry.adopt"
_SCOPE = b"kvferry.scope"
_STORE = b"kvferry.store"

_MOST_INT64 = 2**63 - 1
_MOST_PLAIN_INT = 10**1000  # Python refuses by default to write integers of over 4,300 digits


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides a block's bytes and which tenant may use them.

    Two namespaces that differ in any field share no key. ``revision`` or ``weights_digest``
    identifies the weights. With both empty, two versions of a model under one name have equal keys:
    right only where blocks do not outlive the process that loaded the weights. ``geometry`` has
    layers, KV heads, head size, groups and ranks; ``overrides`` rope scaling and all else that
    changes KV. Both may be plain data, kept as canonical text: 10000 and 10000.0 differ. Whatever
    differs by request (an image, an adapter, a tenant) belongs in :func:`chain`.
    """

    model: str
    dtype: str
    layout: str
    geometry: Described
    block_tokens: int
    revision: str = ""
    weights_digest: str = ""
    overrides: Described = ""
    salt: str = ""
    epoch: int = 0
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "geometry", _canonical("namespace: geometry", self.geometry))
        object.__setattr__(self, "overrides", _canonical("namespace: overrides", self.overrides))
        for name in ("model", "revision", "weights_digest", "dtype", "layout", "salt"):
            object.__setattr__(self, name, _require_text(f"namespace: {name}", getattr(self, name)))
        for name in ("model", "dtype", "layout", "geometry"):
            if not getattr(self, name):
                raise InputError(f"namespace: {name} must not be empty")
        for name, least in (("block_tokens", 1), ("epoch", 0), ("format_version", 1)):
            object.__setattr__(self, name, _require_count(name, getattr(self, name), least))

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of ``KEY_BYTES`` bytes over the names and values of all fields."""
        digest = blake2b(digest_size=KEY_BYTES, person=_NAMESPACE)
        for name in sorted(f.name for f in fields(self)):
            for part in (name, str(getattr(self, name))):
                digest.update(_with_length(part.encode()))
        return digest.digest()

    @cached_property
    def adoption(self) -> bytes:
        """The mask that turns an engine's hashes into keys of this namespace (:func:`adopt`)."""
        return blake2b(self.fingerprint, digest_size=KEY_BYTES, person=_ADOPT).digest()


def chain(
    namespace: Namespace,
    tokens: Integers,
    parent: Key | None = None,
    *,
    salt: str = "",
    extra: Extra = "",
) -> Keys:
    """Return one key per full block of tokens; a last block that is not full has no key.

    ``tokens`` may be a sequence, a numpy array or a torch tensor (copying one from a GPU waits for
    that GPU). ``parent`` is the key of the block before the first token and continues its chain:
    ``chain(ns, t) == chain(ns, t[:k]) + chain(ns, t[k:], parent=...)`` for whole blocks.

    Requests with equal tokens share their blocks, so give everything else that decides the bytes,
    or a request is served another one's KV. ``extra`` is content that the tokens only stand for,
    such as a digest of the images, or the adapter. ``salt`` names the requests that may share (a
    tenant). All keys from these tokens on cover both, so give each only once, where it begins. An
    ``extra`` may begin in the middle (an image after a common prompt). A ``salt`` belongs to a
    whole chain: InputError for a ``salt`` with ``parent``.
    """
    if parent is not None:
        require_key("parent", parent)
        if salt:
            raise InputError("salt belongs to a whole chain: the parent key covers the one it has")
    ids = integers(tokens, "tokens")
    if ids.size and int(ids.min()) < 0:
        raise InputError(f"token ids must not be negative, got {int(ids.min())}")
    ids = ids.astype("<i8", copy=False)
    width = namespace.block_tokens * ids.itemsize
    data = ids[: len(ids) // namespace.block_tokens * namespace.block_tokens].tobytes()
    fresh = blake2b(digest_size=KEY_BYTES, person=_CHAIN).copy  # half the cost of a new one
    above: bytes = namespace.fingerprint if parent is None else parent
    if salt != "" or extra != "":
        above = _request_seed(above, salt, extra)
    keys = []
    for at in range(0, len(data), width):
        digest = fresh()
        digest.update(above + data[at : at + width])
        above = digest.digest()
        keys.append(above)
    return _of_digests(keys)


def _request_seed(above: bytes, salt: str, extra: Extra) -> bytes:
    """Return the bytes hashed before a request's first block: ``above`` with salt and extra."""
    if isinstance(extra, bytes):
        kind, content = b"bytes", extra
    else:
        kind = b"text" if isinstance(extra, str) else b"data"
        content = _canonical("extra", extra).encode()
    secret = _require_text("salt", salt).encode()
    if not secret and not content:  # an empty list of images equals no extra
        return above
    parts = (secret, kind if content else b"", content)
    return blake2b(
        above + b"".join(map(_with_length, parts)), digest_size=KEY_BYTES, person=_REQUEST
    ).digest()


def adopt(namespace: Namespace, hashes: Iterable[bytes]) -> Keys:
    """Return keys for blocks of which the engine already has chained content hashes.

    Each hash must cover every token before its block, and be the same in every process that shares
    a tier. A hash as long as a key is taken for a 256-bit digest; others are digested first. Then
    all are XORed with the namespace's mask, for the reason given in :func:`scope`.
    """
    contents = list(hashes)
    # One check for all hashes: this runs for every request, and most engines' need no digest.
    if not {bytes}.issuperset(map(type, contents)) or not {KEY_BYTES}.issuperset(
        map(len, contents)
    ):
        contents = [_digest(position, content) for position, content in enumerate(contents)]
    return _of_digests(contents).masked(namespace.adoption)


def _of_digests(digests: Sequence[bytes]) -> Keys:
    return Keys.of(np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, KEY_WORDS))


def adopt_one(namespace: Namespace, content: bytes) -> Key:
    """Return the key of one hash, as :func:`adopt` does for many."""
    if type(content) is not bytes or len(content) != KEY_BYTES:
        content = _digest(0, content)
    return masked_key(Key(content), namespace.adoption)


def _digest(position: int, content: bytes) -> bytes:
    if not isinstance(content, bytes) or not content:
        raise InputError(f"hash {position} must be bytes and not empty, got {content!r}")
    if len(content) == KEY_BYTES:
        return content
    return blake2b(content, digest_size=KEY_BYTES, person=_ADOPT).digest()


@lru_cache(maxsize=1024)
def scope(epoch: int, group: int) -> bytes:
    """Return the mask of an epoch and a group, for ``keys.masked(scope(epoch, group))``.

    Masking is one XOR over the batch and its own inverse; ``scope(0, 0)`` is all zeros. Keys and
    masks are 256-bit digests, so two blocks collide only if ``key ^ key'`` equals ``mask ^ mask'``:
    above 2**100 tries with a million scopes. Masks are no secret: the namespace's salt keeps
    tenants apart.
    """
    epoch = _require_count("epoch", epoch, 0)
    group = _require_count("group", group, 0)
    if epoch == group == 0:
        return bytes(KEY_BYTES)
    if epoch and group:  # tiers that outlive the server remove the epoch's mask in all groups
        return bytes(masked_key(Key(scope(epoch, 0)), scope(0, group)))
    place = epoch.to_bytes(8, "little") + group.to_bytes(8, "little")
    return blake2b(place, digest_size=KEY_BYTES, person=_SCOPE).digest()


def store_fingerprint(namespace: Namespace, *parts: Described | int | Sequence[int]) -> bytes:
    """Return a digest of ``KEY_BYTES`` bytes over a namespace and ``parts``, in order.

    ``parts`` are whatever else decides a stored block's bytes: block layout, rank, weight digests.
    """
    digest = blake2b(namespace.fingerprint, digest_size=KEY_BYTES, person=_STORE)
    for part in parts:
        digest.update(_with_length(_canonical("store", [part]).encode()))
    return digest.digest()


def new_epoch(before: int) -> int:
    """Return a new epoch above ``before``: the time in ns, as a tier may outlive this process."""
    return max(time.time_ns(), before + 1)


def _with_length(data: bytes) -> bytes:
    """Return the data after its length, so that moving bytes between parts changes the digest."""
    return len(data).to_bytes(8, "little") + data


def _canonical(name: str, value: Described) -> str:
    """Return the canonical text of plain data: it does not depend on the order of mappings."""
    if isinstance(value, str):
        return _require_text(name, value)
    if not isinstance(value, (Mapping, list, tuple)):
        raise InputError(f"{name} must be text, a mapping or a list, got {type(value).__name__}")
    if not value:
        return ""
    try:
        plain = _plain(name, value)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InputError(f"{name} holds data within data too deep, or itself") from None


def _plain(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{name} has a name that is not text: {key!r}")
            _require_text(f"a name in {name}", key)
        return {str.__str__(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, float) and not np.isfinite(value):
        raise InputError(f"{name} must be finite, got {value}")
    if type(value) is str:
        return _require_text(name, value)
    if type(value) is int and abs(value) > _MOST_PLAIN_INT:
        raise InputError(f"{name} is too large, {quoted(value)}; write it as text")
    if value is None or type(value) in (int, float, bool):
        return value
    raise InputError(f"{name} must be plain data, got {type(value).__name__} {value!r}")


def _require_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {type(value).__name__} {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # A lone surrogate. JSON would write a pair of them like the character they encode.
        raise InputError(f"{name} cannot be written as UTF-8: {error}") from None
    return str.__str__(value)  # a subclass may override __str__


def _require_count(name: str, value: object, least: int) -> int:
    number = integer(value, name)
    if not least <= number <= _MOST_INT64:
        raise InputError(f"{name} must be between {least} and {_MOST_INT64}, got {quoted(number)}")
    return number
