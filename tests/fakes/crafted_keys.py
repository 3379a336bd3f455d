"""Keys made for a purpose: numbered ones, and ones the index can hardly tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Key, Keys


def key(number: int) -> Key:
    """The key of this number: spread like a real one, the same in every run."""
    return Key(blake2b(number.to_bytes(8, "little"), digest_size=KEY_BYTES).digest())


def keys(numbers: Iterable[int]) -> Keys:
    return Keys.from_bytes(map(key, numbers))


def colliding_key(number: int) -> Key:
    """A key of the same row of the index's table as every other one made here."""
    words = np.zeros(KEY_WORDS, dtype="<u8")
    words[0] = 5 | number % 3 << 40  # the row is in the low half
    words[1] = 7 << 32 | number % 2
    words[2] = number
    return Key(words.tobytes())
