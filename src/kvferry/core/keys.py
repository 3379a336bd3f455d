"""Keys of blocks, held as one array so that an operation on all keys of a request is one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NewType, Protocol, overload

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

Key = NewType("Key", bytes)
"""Content identity of one block: ``KEY_BYTES`` bytes."""

KEY_BYTES = 32
KEY_WORDS = KEY_BYTES // 8
KeyArray = npt.NDArray[np.uint64]
_WORD = np.dtype("<u8")


class KeyChain(Protocol):
    """A request's keys, readable one by one: cheaper than a batch where only some are needed."""

    def __len__(self) -> int: ...
    def __getitem__(self, item: int, /) -> Key: ...

    def keys(self) -> Keys:
        """Return all keys as one batch."""


class Keys:
    """An immutable batch of keys, one row of ``KEY_WORDS`` little-endian words each.

    Owns its array and nothing else. The keys are in the order of the blocks in the request.
    """

    __slots__ = ("array",)

    array: KeyArray

    def __init__(self, array: npt.NDArray[Any]) -> None:
        """Wrap rows of words; use :meth:`from_bytes` for keys in bytes."""
        if array.dtype != _WORD or array.ndim != 2 or array.shape[1] != KEY_WORDS:
            raise InputError(
                f"keys must be a (n, {KEY_WORDS}) array of little-endian uint64, "
                f"got shape {array.shape} of {array.dtype}; use Keys.from_bytes for bytes"
            )
        view = np.ascontiguousarray(array)
        if view is array and array.flags.writeable:
            view = array.view()
        view.setflags(write=False)
        self.array = view

    @classmethod
    def from_bytes(cls, keys: Iterable[bytes]) -> Keys:
        """Return keys from bytes objects of ``KEY_BYTES`` each; InputError for other lengths."""
        items = list(keys)
        for position, key in enumerate(items):
            require_key(f"key {position}", key)
        return cls(np.frombuffer(b"".join(items), dtype="<u8").reshape(-1, KEY_WORDS))

    @classmethod
    def of(cls, array: KeyArray) -> Keys:
        """Wrap rows without checks; the caller must not write to ``array`` afterwards."""
        keys = cls.__new__(cls)
        keys.array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        keys.array.setflags(write=False)
        return keys

    @classmethod
    def empty(cls) -> Keys:
        return cls(np.empty((0, KEY_WORDS), dtype="<u8"))

    def masked(self, mask: bytes) -> Keys:
        """Return every key XORed with a ``KEY_BYTES`` mask (see ``core.identity.scope``)."""
        return Keys.of(self.array ^ np.frombuffer(mask, dtype=_WORD))

    def keys(self) -> Keys:
        """Return itself: a batch is also a :class:`KeyChain`."""
        return self

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, item: int) -> Key: ...
    @overload
    def __getitem__(self, item: slice) -> Keys: ...
    def __getitem__(self, item: int | slice) -> Key | Keys:
        if isinstance(item, slice):
            return Keys.of(self.array[item])
        return Key(self.array[item].tobytes())

    def take(self, positions: npt.NDArray[Any]) -> Keys:
        """Return the keys at ``positions`` (numbers or a boolean mask), in that order."""
        return Keys.of(self.array[positions])

    def has_duplicates(self) -> bool:
        """Whether any key occurs twice."""
        # Comparing first words nearly always decides; keys with equal ones are compared whole.
        words = np.sort(self.array[:, 0])
        is_doubtful = bool(np.count_nonzero(words[1:] == words[:-1]))
        return is_doubtful and len(set(self)) != len(self)

    def __iter__(self) -> Iterator[Key]:
        data = self.array.tobytes()
        return (Key(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES))

    def __add__(self, other: Keys) -> Keys:
        return Keys.of(np.concatenate((self.array, other.array)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"Keys({len(self)})"


class BlockNames:
    """Maps a request's chain to the pool keys of one group's blocks in one epoch.

    ::

        chain    k0 k1 k2 k3 k4 k5 k6 k7      one key per hash block, each covers all before it
        blocks   [    k3    ][    k7    ]     a block of four hash blocks has the last one's key

    The ``mask`` makes the pool keys differ from those of other groups and epochs.
    """

    __slots__ = ("_words", "mask", "ratio")

    def __init__(self, ratio: int, mask: bytes) -> None:
        self.ratio = ratio
        self.mask = mask
        self._words = np.frombuffer(mask, dtype=_WORD) if any(mask) else None

    def of(self, keys: Keys, blocks: range) -> Keys:
        """Return the pool keys of these blocks of a request."""
        ratio, words = self.ratio, self._words
        if words is None and ratio == 1 and blocks == range(len(keys.array)):
            return keys
        part = keys.array[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]
        return Keys.of(part if words is None else part ^ words)

    def all(self, keys: Keys) -> Keys:
        """Return the pool keys of all whole blocks of a request."""
        return self.of(keys, range(len(keys.array) // self.ratio))

    def leading(self, chain: KeyChain, num_keys: int | None) -> Keys:
        """Return the pool keys of the whole blocks in a chain, or in its first ``num_keys``."""
        keys = chain.keys()
        if num_keys is not None and num_keys < len(keys.array):
            keys = keys[:num_keys]
        return self.all(keys)

    def before(self, keys: Keys, first: int) -> Key | None:
        """Return the pool key of the block before block ``first``; None for the first block."""
        return masked_key(keys[first * self.ratio - 1], self.mask) if first else None


Recovered = tuple[Keys, npt.NDArray[np.int64]]
"""Blocks that a tier still has from an earlier process: their keys and slots, oldest write first.

A slot occurs once. A key may have several slots: a block that was evicted from one slot and written
again to another is complete in both.
"""


def masked_key(key: Key, mask: bytes) -> Key:
    """Return one key XORed with a mask, as ``Keys.masked`` does for many."""
    word = int.from_bytes(key, "little") ^ int.from_bytes(mask, "little")
    return Key(word.to_bytes(KEY_BYTES, "little"))


def require_key(name: str, key: object) -> None:
    """Raise InputError unless ``key`` is a key; ``name`` begins the message."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise InputError(f"{name} must be a key of {KEY_BYTES} bytes, got {what}")
