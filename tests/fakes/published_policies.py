"""The published policies as their authors wrote them down, a key at a time, in plain Python.

A request is gone through from its end, so that its end is the first to go.
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

    def miss(self, key: int) -> None:
        """Make room for one key, and let it in."""
        raise NotImplementedError

    def serve(self, keys: list[int]) -> None:
        there = [key for key in keys if key in self.resident]
        for key in reversed(there):
            self.hit(key)
        for key in reversed([key for key in keys if key not in there]):
            self.miss(key)


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

    def replace(self, was_frequent: bool) -> None:
        full = len(self.t1) > self.p or (was_frequent and len(self.t1) == self.p)
        if self.t1 and (full or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def miss(self, key: int) -> None:
        was_frequent, known = key in self.b2, key in self.b1 or key in self.b2
        if key in self.b1:
            self.p = min(float(self.capacity), self.p + max(1, len(self.b2) / len(self.b1)))
        elif was_frequent:
            self.p = max(0.0, self.p - max(1, len(self.b1) / len(self.b2)))
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        if len(self.resident) == self.capacity:
            self.replace(was_frequent)
        (self.t2 if known else self.t1)[key] = None
        while len(self.t1) + len(self.b1) > self.capacity:
            self.b1.popitem(last=False)
        while len(self.resident) + len(self.b1) + len(self.b2) > 2 * self.capacity:
            self.b2.popitem(last=False)


class PublishedS3Fifo(Published):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.freq: dict[int, int] = {}
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.small_size = max(1, int(0.1 * capacity))

    @property
    def resident(self) -> set[int]:
        return {*self.small, *self.main}

    def hit(self, key: int) -> None:
        self.freq[key] = min(3, self.freq[key] + 1)

    def evict(self) -> None:
        while True:
            if len(self.small) >= self.small_size or not self.main:
                key = self.small.pop(0)
                if self.freq[key] <= 1:
                    self.ghosts[key] = None
                    while len(self.ghosts) > self.capacity - self.small_size:
                        self.ghosts.popitem(last=False)
                    return
                self.freq[key] = 0
                self.main.append(key)
            else:
                key = self.main.pop(0)
                if not self.freq[key]:
                    return
                self.freq[key] -= 1
                self.main.append(key)

    def miss(self, key: int) -> None:
        if len(self.resident) == self.capacity:
            self.evict()
        (self.main if key in self.ghosts else self.small).append(key)
        self.ghosts.pop(key, None)
        self.freq[key] = 0


class PublishedWTinyLfu(Published):
    """With exact counts, where the authors have a sketch."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window: OrderedDict[int, None] = OrderedDict()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()
        self.most_window = max(1, int(0.01 * capacity))
        self.most_protected = max(1, int(0.8 * (capacity - self.most_window)))
        self.counts: dict[int, int] = {}
        self.num_counted = 0

    @property
    def resident(self) -> set[int]:
        return {*self.window, *self.probation, *self.protected}

    def serve(self, keys: list[int]) -> None:
        for key in keys:
            self.counts[key] = self.counts.get(key, 0) + 1
        self.num_counted += len(keys)
        if self.num_counted >= 10 * self.capacity:
            self.num_counted //= 2
            self.counts = {key: count // 2 for key, count in self.counts.items() if count > 1}
        super().serve(keys)

    def hit(self, key: int) -> None:
        if key in self.window:
            self.window.move_to_end(key)
            return
        self.probation.pop(key, None)
        self.protected.pop(key, None)
        self.protected[key] = None
        if len(self.protected) > self.most_protected:
            self.probation[self.protected.popitem(last=False)[0]] = None

    def miss(self, key: int) -> None:
        self.window[key] = None
        if len(self.window) > self.most_window:
            candidate = self.window.popitem(last=False)[0]
            if len(self.resident) < self.capacity:
                self.probation[candidate] = None
                return
            main = self.probation or self.protected
            victim = next(iter(main))
            if self.counts.get(candidate, 0) > self.counts.get(victim, 0):
                del main[victim]
                self.probation[candidate] = None
