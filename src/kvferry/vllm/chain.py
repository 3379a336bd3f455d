"""The keys of one vLLM request: adopted from its block hashes, extended as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.identity import Namespace, adopt, adopt_one
from kvferry.keys import Keys
from kvferry.types import Key

_NO_KEYS = Keys.empty()
_MOST_KEYS = 1 << 17
"""Of requests that have ended: 4 MiB."""


class Naming:
    """Whose hashes become which keys. Owns the keys of requests that ended lately.

    Who goes on with one of those has the same hash where that ended, and so the same keys up to
    there: to name a conversation's new blocks takes a fraction of what all of them take.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._ended: dict[bytes, Keys] = {}  # by the last hash, the oldest first
        self._num_keys = 0

    def remember(self, last: bytes, keys: Keys) -> None:
        """A request has ended whose last block has this hash."""
        self.take(last)
        self._ended[last] = keys
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS:
            self.take(next(iter(self._ended)))

    def take(self, last: bytes) -> Keys | None:
        """The keys of a request that ended with this hash, if remembered: who goes on has them."""
        keys = self._ended.pop(last, None)
        if keys is not None:
            self._num_keys -= len(keys)
        return keys


class RequestKeys:
    """A vLLM request and the keys of the hash blocks it has so far: its chain.

    Owns nothing of vLLM's; reads ``block_hashes``, which vLLM extends with every full block of
    known tokens. Those hashes cover the salt, the adapter and the images of the request.
    """

    __slots__ = ("_keys", "_last", "_naming", "_num_ended", "had_blocks", "num_past", "request")

    def __init__(self, request: Any, naming: Naming) -> None:
        self.request = request
        self._naming = naming
        self._keys = _NO_KEYS
        self._last: bytes | None = None
        self._num_ended = 0  # blocks, once it has; until that is remembered
        self.num_past = 0
        """Blocks that vLLM had of it when it came: where it may go on with one that has ended."""
        self.had_blocks: Sequence[Sequence[int]] = ()
        """Once it has ended: its device blocks, by group. They may be others' by now."""

    def __len__(self) -> int:
        return len(self.request.block_hashes)

    def __getitem__(self, position: int) -> Key:
        """One key, without the others."""
        return adopt_one(self._naming.namespace, self.request.block_hashes[position])

    def keys(self) -> Keys:
        hashes = self.request.block_hashes
        known = len(self._keys.array)
        # Chained, so one equal hash means that all before it are equal: a request whose tokens
        # were replaced (streamed input) starts over.
        if known > len(hashes) or (known and hashes[known - 1] != self._last):
            self._keys, known = _NO_KEYS, 0
        if not known and 0 < self.num_past <= len(hashes):
            known = self._go_on(hashes[self.num_past - 1])
        if known < len(hashes):
            new = adopt(self._naming.namespace, hashes[known:])
            self._keys = self._keys + new if known else new
            self._last = hashes[-1]
        if 0 < self._num_ended <= len(hashes):
            count, self._num_ended = self._num_ended, 0
            # Copied, or a few keys of a long prompt would keep all of its alive.
            ended = self._keys if count == len(hashes) else self._keys.take(np.arange(count))
            self._naming.remember(hashes[count - 1], ended)
        return self._keys

    def _go_on(self, last: bytes) -> int:
        """Take up the keys of a request that ended where this one goes on; returns how many."""
        keys = self._naming.take(last)
        if keys is None or len(keys) != self.num_past:
            return 0
        self._keys, self._last = keys, last
        return len(keys)

    def end(self, block_ids: Sequence[Sequence[int]]) -> None:
        """It is over, and had these blocks: its next turn goes on where it is computed up to."""
        self.had_blocks = block_ids
        computed = getattr(self.request, "num_computed_tokens", 0)
        self._num_ended = computed // self._naming.namespace.block_tokens
