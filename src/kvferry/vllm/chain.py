"""The keys of one vLLM request: adopted from its block hashes, extended as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.identity import Namespace, adopt, adopt_one
from kvferry.keys import Keys
from kvferry.types import Key

_NO_KEYS = Keys.empty()


class RequestKeys:
    """A vLLM request and the keys of the hash blocks it has so far: its chain.

    Owns nothing of vLLM's; reads ``block_hashes``, which vLLM extends with every full block of
    known tokens. Those hashes cover the salt, the adapter and the images of the request.
    """

    __slots__ = ("_keys", "_last", "_namespace", "had_blocks", "request")

    def __init__(self, request: Any, namespace: Namespace) -> None:
        self.request = request
        self._namespace = namespace
        self._keys = _NO_KEYS
        self._last: bytes | None = None
        self.had_blocks: Sequence[Sequence[int]] = ()
        """Once it has ended: its device blocks, by group. They may be others' by now."""

    def __len__(self) -> int:
        return len(self.request.block_hashes)

    def __getitem__(self, position: int) -> Key:
        """One key, without the others."""
        return adopt_one(self._namespace, self.request.block_hashes[position])

    def keys(self) -> Keys:
        hashes = self.request.block_hashes
        known = len(self._keys.array)
        # Chained, so one equal hash means that all before it are equal: a request whose tokens
        # were replaced (streamed input) starts over.
        if known > len(hashes) or (known and hashes[known - 1] != self._last):
            self._keys, known = _NO_KEYS, 0
        if known < len(hashes):
            new = adopt(self._namespace, hashes[known:])
            self._keys = self._keys + new if known else new
            self._last = hashes[-1]
        return self._keys
