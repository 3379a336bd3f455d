"""What was said of blocks that only the device has, for stores that no request orders.

With lazy stores a block is stored when the engine is about to drop it, mostly long after the
request that computed it has ended. What was said of that request is remembered until then::

    not to be stored    blocks of its own, unless another that may be stored had them as well
    the rest            whose share it takes, how long it is kept, how much it matters
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.types import Key

if TYPE_CHECKING:
    from kvferry.scheduler.hinted import HintedRequest
    from kvferry.scheduler.request import Request


class OnDevice:
    """Owns what is to be heeded of such blocks, up to ``most_keys`` of each kind, the latest.

    That must be more than the device has blocks: what has gone from the device is forgotten first.
    """

    def __init__(self, most_keys: int, hash_tokens: int) -> None:
        self._most_keys = most_keys
        self._hash_tokens = hash_tokens
        self._bounded: dict[HintedRequest, int] = {}  # live, and how many keys are withheld so far
        self._withheld: dict[Key, None] = {}  # the oldest first
        self._heeded: OrderedDict[HintedRequest, Keys] = OrderedDict()
        self._num_heeded = 0
        self._last: dict[Key, HintedRequest] = {}

    def __len__(self) -> int:
        """How many keys are remembered in all."""
        return len(self._withheld) + self._num_heeded

    def opened(self, request: HintedRequest) -> None:
        """Only some of its blocks may be stored: others are withheld as soon as there are any."""
        self._bounded[request] = 0

    def ended(self, request: Request) -> None:
        """What it has computed may be dropped from now on, and is stored before if it may be."""
        hints = request.hints
        if hints is None:
            if self._withheld:
                self._allow(request.chain.keys())
            return
        keys = request.chain.keys()
        request.chain = keys  # what the engine knows of it is the engine's to forget
        if hints.max_store_tokens is None:
            self._allow(keys)
        else:
            self._allow(keys[: hints.max_store_tokens // self._hash_tokens])
            self._bounded.pop(request, None)  # type: ignore[call-overload]
            self._withhold(request)  # type: ignore[arg-type]
        if hints.shapes_what_stays or request.tenant:
            self._heed(request, keys)  # type: ignore[arg-type]

    def may_store(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key of a device block, whether its block may be stored."""
        for request in self._bounded:
            self._withhold(request)
        if not self._withheld:
            return np.ones(len(keys), dtype=bool)
        return np.fromiter((key not in self._withheld for key in keys), dtype=bool, count=len(keys))

    def by_request(
        self, keys: Keys, chosen: npt.NDArray[np.int64]
    ) -> list[tuple[HintedRequest | None, npt.NDArray[np.int64]]]:
        """The chosen keys' places, by whose request is to be heeded for them; in their order."""
        if not self._last:
            return [(None, chosen)]
        parts: dict[HintedRequest | None, list[int]] = {}
        for at in chosen.tolist():
            parts.setdefault(self._last.get(keys[at]), []).append(at)
        return [(request, np.array(part, dtype=np.int64)) for request, part in parts.items()]

    def _allow(self, keys: Keys) -> None:
        if self._withheld:
            for key in keys:
                self._withheld.pop(key, None)

    def _withhold(self, request: HintedRequest) -> None:
        """Its own blocks behind those that may be stored; as many as it has by now."""
        most = request.hints.max_store_tokens
        assert most is not None
        first = max(most, request.own_from or 0) // self._hash_tokens
        first = max(first, self._bounded.get(request, 0))
        if len(request.chain) <= first:
            return
        for key in request.chain.keys()[first:]:
            self._withheld.pop(key, None)
            self._withheld[key] = None
        if request in self._bounded:
            self._bounded[request] = len(request.chain)
        while len(self._withheld) > self._most_keys:
            del self._withheld[next(iter(self._withheld))]

    def _heed(self, request: HintedRequest, keys: Keys) -> None:
        self._heeded[request] = keys
        self._num_heeded += len(keys)
        self._last.update(dict.fromkeys(keys, request))
        while self._num_heeded > self._most_keys and len(self._heeded) > 1:
            oldest, gone = self._heeded.popitem(last=False)
            self._num_heeded -= len(gone)
            for key in gone:
                if self._last.get(key) is oldest:
                    del self._last[key]
