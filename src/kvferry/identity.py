"""Tokens to a chain of Keys, the same in every process and on every machine.

::

    namespace ── fingerprint ─┐
                              ▼
    tokens of block 0 ─────▶ key 0 ─┐          key = blake2b(parent, tokens as int64)
                                    ▼
    tokens of block 1 ───────────▶ key 1 ─┐    so a key covers its block and all before it,
                                          ▼
    tokens of block 2 ─────────────────▶ key 2 under everything that could change the bytes

Nothing here uses ``hash()``, ``str(dict)`` or the machine's byte order. What is doubtful must make
the keys differ: a miss costs time, a wrong hit costs trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError, KeyFormatError
from kvferry.keys import KEY_WORDS, Keys, masked_key
from kvferry.types import KEY_BYTES, Key

FORMAT_VERSION = 2
"""Part of every fingerprint. Raise it when keys or the bytes of a slot change their meaning."""

Described = str | Mapping[str, Any] | list[Any] | tuple[Any, ...]
"""Text, or plain data (numbers, text, None, lists, mappings by name) with one canonical text."""

# One digest, four uses that can never be mistaken for each other.
_NAMESPACE = b"kvferry.ns"
_CHAIN = b"kvferry.chain"
_ADOPT = b"kvferry.adopt"
_SCOPE = b"kvferry.scope"

_MOST_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides the bytes of a block, and who may see them.

    Owns the fingerprint; leaves the tokens to :func:`chain`. Two namespaces that differ in any
    field share no key.

    ``revision`` or ``weights_digest`` should say which weights these are. With both empty two
    versions of a model under one name cannot be told apart: right only where blocks do not outlive
    the process that loaded the weights. ``geometry`` (layers, KV heads, head size, groups, ranks)
    and ``overrides`` (rope scaling and whatever else changes KV) may be plain data; they are kept
    as canonical text, so the order of a mapping's entries means nothing. Numbers are told apart as
    they are written: 10000 and 10000.0 differ.
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
        object.__setattr__(self, "geometry", _canonical("geometry", self.geometry))
        object.__setattr__(self, "overrides", _canonical("overrides", self.overrides))
        for name in ("model", "revision", "weights_digest", "dtype", "layout", "salt"):
            _require_text(name, getattr(self, name))
        for name in ("model", "dtype", "layout", "geometry"):
            if not getattr(self, name):
                raise InputError(f"namespace: {name} must not be empty")
        for name, least in (("block_tokens", 1), ("epoch", 0), ("format_version", 1)):
            object.__setattr__(self, name, _require_count(name, getattr(self, name), least))

    @cached_property
    def fingerprint(self) -> bytes:
        """``KEY_BYTES`` bytes over every field, each as its length and bytes, name by name."""
        digest = blake2b(digest_size=KEY_BYTES, person=_NAMESPACE)
        for name in sorted(f.name for f in fields(self)):
            for part in (name, str(getattr(self, name))):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    @cached_property
    def adoption(self) -> bytes:
        """The mask that moves an engine's hashes into this namespace."""
        return blake2b(self.fingerprint, digest_size=KEY_BYTES, person=_ADOPT).digest()

    def bump(self) -> Namespace:
        """The next epoch: shares no key with this one, so everything stored so far is forgotten."""
        return replace(self, epoch=self.epoch + 1)


def chain(
    namespace: Namespace,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    parent: Key | None = None,
) -> Keys:
    """One key per full block of tokens; a last block that is not full has none.

    With ``parent``, the key of the block before the first token, a chain goes on exactly where it
    stopped: ``chain(ns, t) == chain(ns, t[:k]) + chain(ns, t[k:], parent=...)`` for whole blocks.
    """
    if parent is not None:
        _require_key("parent", parent)
    ids = _as_tokens(tokens)
    width = namespace.block_tokens * ids.itemsize
    data = ids[: len(ids) // namespace.block_tokens * namespace.block_tokens].tobytes()
    fresh = blake2b(digest_size=KEY_BYTES, person=_CHAIN).copy  # half the cost of a new one
    above: bytes = namespace.fingerprint if parent is None else parent
    keys = []
    for at in range(0, len(data), width):
        digest = fresh()
        digest.update(above + data[at : at + width])
        above = digest.digest()
        keys.append(above)
    return _joined(keys)


def adopt(namespace: Namespace, hashes: Iterable[bytes]) -> Keys:
    """Keys for blocks whose engine already has a chained content hash of each.

    The hashes must themselves cover every token before the block, and be the same in every process
    that shares a tier: an engine that seeds them at random never hits across processes. One as long
    as a key is taken for a 256-bit digest, others are digested first; then one mask moves all of
    them into the namespace, which is sound for the reasons given at :func:`scope`.
    """
    contents = list(hashes)
    # All at once: this is done for every request, and most engines' hashes need nothing more.
    if not {bytes}.issuperset(map(type, contents)) or not {KEY_BYTES}.issuperset(
        map(len, contents)
    ):
        contents = [_digest(position, content) for position, content in enumerate(contents)]
    return _joined(contents).masked(namespace.adoption)


def adopt_one(namespace: Namespace, content: bytes) -> Key:
    """One key as :func:`adopt` gives it."""
    return masked_key(Key(_digest(0, content)), namespace.adoption)


def _digest(position: int, content: bytes) -> bytes:
    if not isinstance(content, bytes) or not content:
        raise InputError(f"hash {position} must be bytes and not empty, got {content!r}")
    if len(content) == KEY_BYTES:
        return content
    return blake2b(content, digest_size=KEY_BYTES, person=_ADOPT).digest()


@lru_cache(maxsize=1024)
def scope(epoch: int, group: int) -> bytes:
    """The mask that moves keys into an epoch and a group: ``keys.masked(scope(epoch, group))``.

    One XOR over the batch instead of one more digest per key, its own inverse, and all zeros for
    ``scope(0, 0)``. Sound because keys and masks are both outputs of a 256-bit digest: for two
    different blocks or scopes to meet, ``key ^ key'`` must equal ``mask ^ mask'``. One block under
    two scopes would need two equal digests. Two blocks would need keys with a difference fixed in
    advance by a pair of scopes, as hard as a collision (2**128 tries) divided by the square root of
    the number of pairs in use; a million scopes leave it above 2**100. Masks are no secret: they
    keep blocks apart, while the namespace's salt keeps tenants apart.
    """
    epoch = _require_count("epoch", epoch, 0)
    group = _require_count("group", group, 0)
    if epoch == group == 0:
        return bytes(KEY_BYTES)
    place = epoch.to_bytes(8, "little") + group.to_bytes(8, "little")
    return blake2b(place, digest_size=KEY_BYTES, person=_SCOPE).digest()


def _joined(keys: list[bytes]) -> Keys:
    return Keys(np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, KEY_WORDS))


def _as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Token ids as a little-endian int64 vector; refuses whatever would be a guess."""
    ids = tokens if isinstance(tokens, np.ndarray) else _tokens_of(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"tokens must be a vector of integers, got an array of shape {ids.shape} of {ids.dtype}"
        )
    if ids.size and int(ids.min()) < 0:
        raise InputError(f"token ids must not be negative, got {int(ids.min())}")
    if ids.size and int(ids.max()) > _MOST_INT64:
        raise InputError(f"token ids must fit 64 signed bits, got {int(ids.max())}")
    return ids.astype("<i8", copy=False)


def _tokens_of(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise InputError(f"tokens must be a sequence of integers, got {type(tokens).__name__}")
    items = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
    # By type, not by value: numpy would take True as 1 and cut 1.5 to 1.
    for kind in set(map(type, items)):
        if kind is not int and (issubclass(kind, bool) or not issubclass(kind, Integral)):
            raise InputError(f"token ids must be integers, got a {kind.__name__}")
    try:
        return np.fromiter(items, dtype=np.int64, count=len(items))
    except OverflowError:
        worst = max(items, key=abs)
        raise InputError(f"token ids must fit 64 signed bits, got {worst}") from None


def _canonical(name: str, value: Described) -> str:
    """One text for plain data, whatever the order its mappings were built in."""
    if isinstance(value, str):
        return _require_text(name, value)
    if not isinstance(value, (Mapping, list, tuple)):
        raise InputError(
            f"namespace: {name} must be text, a mapping or a list, got {type(value).__name__}"
        )
    if not value:
        return ""
    return json.dumps(_plain(name, value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"namespace: {name} has a name that is not text: {key!r}")
        return {key: _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, float) and not np.isfinite(value):
        raise InputError(f"namespace: {name} must be finite, got {value}")
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise InputError(f"namespace: {name} must be plain data, got {type(value).__name__} {value!r}")


def _require_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"namespace: {name} must be text, got {type(value).__name__} {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"namespace: {name} cannot be written as UTF-8: {error}") from None
    return value


def _require_count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if not least <= int(value) <= _MOST_INT64:
        raise InputError(f"{name} must be between {least} and {_MOST_INT64}, got {value}")
    return int(value)


def _require_key(name: str, key: object) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise KeyFormatError(f"{name} must be a key of {KEY_BYTES} bytes, got {what}")
