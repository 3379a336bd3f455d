"""The published policies as their authors wrote them down, a key at a time, in plain Python.

A call brings a batch: what is there is hit, room is made for the rest, and the rest comes in. The
last of a batch is the first to go, so batches are gone through from their end.
"""

from __future__ import annotations

from collections import OrderedDict


class Published:
    """``serve`` is one request; ``resident`` says what is there after it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @property
    def resident(self) -> set[int]:
        raise NotImplementedError

    def hit(self, key: int) -> None:
        raise NotImplementedError

    def evict(self) -> int:
        raise NotImplementedError

    def admit(self, keys: list[int]) -> None:
        raise NotImplementedError

    def serve(self, keys: list[int]) -> list[int]:
        """Returns who had to go, in that order."""
        there = [key for key in keys if key in self.resident]
        new = [key for key in keys if key not in self.resident]
        for key in reversed(there):
            self.hit(key)
        gone = []
        while len(self.resident) + len(new) > self.capacity:
            gone.append(self.evict())
        self.admit(new)
        return gone


class PublishedSlru(Published):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()

    @property
    def resident(self) -> set[int]:
        return {*self.probation, *self.protected}

    def hit(self, key: int) -> None:
        self.probation.pop(key, None)
        self.protected.pop(key, None)
        self.protected[key] = None

    def serve(self, keys: list[int]) -> list[int]:
        there = [key for key in keys if key in self.resident]
        for key in reversed(there):
            self.hit(key)
        while len(self.protected) > max(1, int(0.8 * self.capacity)):
            key, _ = self.protected.popitem(last=False)
            self.probation[key] = None
        gone = []
        new = [key for key in keys if key not in there]
        while len(self.resident) + len(new) > self.capacity:
            gone.append(self.evict())
        self.admit(new)
        return gone

    def evict(self) -> int:
        return (self.probation or self.protected).popitem(last=False)[0]

    def admit(self, keys: list[int]) -> None:
        for key in reversed(keys):
            self.probation[key] = None


class PublishedArc(Published):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()
        self.p = 0.0

    @property
    def resident(self) -> set[int]:
        return {*self.t1, *self.t2}

    def hit(self, key: int) -> None:
        self.t1.pop(key, None)
        self.t2.pop(key, None)
        self.t2[key] = None

    def evict(self) -> int:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            key, _ = self.t1.popitem(last=False)
            self.b1[key] = None
        else:
            key, _ = self.t2.popitem(last=False)
            self.b2[key] = None
        return key

    def admit(self, keys: list[int]) -> None:
        known = []
        for key in keys:
            if key in self.b1:
                self.p = min(float(self.capacity), self.p + max(1, len(self.b2) / len(self.b1)))
                del self.b1[key]
                known.append(key)
            elif key in self.b2:
                self.p = max(0.0, self.p - max(1, len(self.b1) / len(self.b2)))
                del self.b2[key]
                known.append(key)
        for key in reversed(keys):
            (self.t2 if key in known else self.t1)[key] = None
        while len(self.t1) + len(self.b1) > self.capacity and self.b1:
            self.b1.popitem(last=False)
        while len(self.b1) + len(self.b2) + len(self.resident) > 2 * self.capacity and self.b2:
            self.b2.popitem(last=False)


class PublishedS3Fifo(Published):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.freq: dict[int, int] = {}
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    @property
    def resident(self) -> set[int]:
        return {*self.small, *self.main}

    def hit(self, key: int) -> None:
        self.freq[key] = min(3, self.freq[key] + 1)

    @property
    def small_size(self) -> int:
        return max(1, int(0.1 * self.capacity))

    def evict(self) -> int:
        while True:
            if len(self.small) >= self.small_size or not self.main:
                key = self.small.pop(0)
                if self.freq[key] <= 1:
                    self.ghosts[key] = None
                    return key
                self.freq[key] = 0
                self.main.append(key)
            else:
                key = self.main.pop(0)
                if not self.freq[key]:
                    return key
                self.freq[key] -= 1
                self.main.append(key)

    def admit(self, keys: list[int]) -> None:
        for key in reversed(keys):
            (self.main if key in self.ghosts else self.small).append(key)
            self.freq[key] = 0
        for key in keys:
            self.ghosts.pop(key, None)
        while len(self.ghosts) > self.capacity - self.small_size:
            self.ghosts.popitem(last=False)
