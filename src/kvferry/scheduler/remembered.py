"""What was lately heard of keys that others know: a memory with a bound, for whole requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.index import Index
from kvferry.keys import Keys
from kvferry.types import NO_SLOT, SlotArray

Flags = npt.NDArray[np.bool_]

_NEVER = float("-inf")


class Remembered:
    """The last ``capacity`` keys that were asked about or sent; the oldest go first.

    Owns, for each, the last answer (there or not), how long it is believed, and whether we sent the
    block there ourselves, which is believed until we hear otherwise.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"a memory of answers needs room for at least one, got {capacity}")
        self.capacity = capacity
        self._index = Index(capacity)
        self._used = np.zeros(capacity, dtype=bool)
        self._there = np.zeros(capacity, dtype=bool)
        self._until = np.full(capacity, _NEVER)
        self._sent = np.zeros(capacity, dtype=bool)
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def there(self, keys: Keys, now: float) -> Flags:
        """For each key, whether the answer was yes, and is still believed."""
        found = self._index.find(keys)
        return self._believed(found, now) & self._there.take(found, mode="wrap")

    def unknown(self, keys: Keys, now: float) -> Flags:
        """For each key, whether there is no answer that is still believed."""
        return ~self._believed(self._index.find(keys), now)

    def _believed(self, found: SlotArray, now: float) -> Flags:
        return (found != NO_SLOT) & (self._until.take(found, mode="wrap") > now)

    def sent(self, keys: Keys) -> Flags:
        """For each key, whether we sent its block there, and have not heard that it is gone."""
        found = self._index.find(keys)
        return (found != NO_SLOT) & self._sent.take(found, mode="wrap")

    def answer(self, keys: Keys, there: Flags, until: float) -> None:
        """Believe until then what was said of these keys. What is not there was not sent either."""
        slots = self._slots(keys)
        self._there[slots] = there[: len(slots)]
        self._until[slots] = until
        self._sent[slots] &= there[: len(slots)]

    def doubt_sent(self, keys: Keys) -> None:
        """Somebody did not find these: do not rely on having sent them."""
        found = self._index.find(keys)
        self._sent[found[found != NO_SLOT]] = False

    def note_sent(self, keys: Keys) -> None:
        """The blocks of these keys are on their way there."""
        self._sent[self._slots(keys)] = True

    def doubt(self) -> None:
        """Believe no answer any more; what we sent we still know."""
        self._until.fill(_NEVER)

    def clear(self) -> None:
        self._index.clear()
        self._used.fill(False)

    def _slots(self, keys: Keys) -> SlotArray:
        """The places of these (distinct) keys, as the newest; what was known of them stays."""
        keys = keys[: self.capacity]
        old = self._index.find(keys)
        known = old != NO_SLOT
        was = [of.take(old, mode="wrap") for of in (self._there, self._until, self._sent)]
        self._drop(old[known])
        slots = (self._next + np.arange(len(keys))) % self.capacity
        self._next = (self._next + len(keys)) % self.capacity
        self._drop(slots[self._used.take(slots)])
        self._index.insert(keys, slots)
        self._used[slots] = True
        self._there[slots] = was[0] & known
        self._until[slots] = np.where(known, was[1], _NEVER)
        self._sent[slots] = was[2] & known
        return slots

    def _drop(self, slots: SlotArray) -> None:
        self._index.remove(slots)
        self._used[slots] = False
