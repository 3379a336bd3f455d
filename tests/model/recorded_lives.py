"""Long random lives of a pool, and a digest of all that it decided in each.

A life is conversations that return, branch and end, mixed with single calls of every kind. Only
what a pool answers goes into the digest: slots, hits, evicted keys in their order, counts. So two
versions of the code that decide alike have the same digest, whatever they call things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

CHECK_EVERY = 500


class Subject(Protocol):
    """A pool under its current names. Blocks are numbers; slots are lists of numbers."""

    def advance(self, seconds: float) -> None: ...
    def lookup(self, blocks: Sequence[int]) -> list[int]: ...
    def reserve(
        self, blocks: Sequence[int], parent: int | None, chained: bool, tenant: int
    ) -> Any: ...
    def lease(self, blocks: Sequence[int], copies: bool) -> Any: ...
    def end(self, lease: Any, how: str, failed: Sequence[int]) -> None: ...
    def touch(self, blocks: Sequence[int]) -> None: ...
    def asked(self, blocks: Sequence[int], tokens: int, found: int) -> None: ...
    def answered(self, blocks: Sequence[int], tokens: int) -> None: ...
    def hint(self, blocks: Sequence[int], over: bool, within: float | None) -> int: ...
    def pin(self, blocks: Sequence[int], seconds: float, priority: int | None) -> int: ...
    def unpin(self, blocks: Sequence[int]) -> int: ...
    def evict_first(self, blocks: Sequence[int], priority: int, first: int) -> None: ...
    def drop(self, blocks: Sequence[int]) -> int: ...
    def coldest(self, count: int) -> list[bytes]: ...
    def reset(self) -> None: ...
    def grow(self, num_ready: int) -> None: ...
    def evicted(self) -> list[bytes]: ...
    def counts(self) -> list[int]: ...
    def check(self) -> None: ...


@dataclass
class Recorded:
    """What a life came to: a digest every so many calls, and how much was hit and evicted."""

    checkpoints: list[str] = field(default_factory=list)
    num_hits: int = 0
    num_evicted: int = 0


@dataclass
class Chat:
    """A conversation: its blocks, and whose it is."""

    blocks: list[int]
    tenant: int


class Life:
    """Plays one life on a subject. Owns the conversations, the open leases and the digest."""

    def __init__(
        self, subject: Subject, seed: int, num_slots: int, num_tenants: int, *, fails: bool
    ) -> None:
        """``fails``: whether leases may end badly."""
        self._subject = subject
        self._fails = fails
        self._rng = Random(seed)
        self._num_slots = num_slots
        self._num_tenants = num_tenants
        self._num_blocks = 0
        self._shared = [self._new(6), self._new(12)]
        self._chats: list[Chat] = []
        self._open: list[tuple[Any, bool]] = []
        self._digest = blake2b(digest_size=6)
        self.recorded = Recorded()

    def play(self, num_calls: int) -> Recorded:
        """So many calls, or a few more."""
        singles = self._singles()
        for number in range(1, num_calls + 1):
            self._subject.advance(self._rng.expovariate(2.0))
            if self._rng.random() < 0.5:
                self._turn()
            else:
                singles[self._rng.randrange(len(singles))]()
            self._note(*self._subject.counts())
            gone = self._subject.evicted()
            self.recorded.num_evicted += len(gone)
            self._digest.update(b"".join(gone))
            if number % CHECK_EVERY == 0:
                self._subject.check()
                self.recorded.checkpoints.append(self._digest.hexdigest())
        return self.recorded

    def _note(self, *numbers: int) -> None:
        self._digest.update(",".join(map(str, numbers)).encode() + b";")

    def _new(self, count: int) -> list[int]:
        self._num_blocks += count
        return list(range(self._num_blocks - count, self._num_blocks))

    # -- a request ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """A request of a conversation: it looks up, loads, stores, and ends."""
        rng, subject = self._rng, self._subject
        chat = self._next_chat()
        asked = list(chat.blocks)
        slots = subject.lookup(asked)
        self.recorded.num_hits += len(slots)
        self._note(*slots)
        subject.asked(asked, 16 * len(asked) + rng.randrange(16), len(slots))
        if slots:
            self._claim(subject.lease(asked[: len(slots)], False))
        if rng.random() < 0.8:
            self._end_one()
        answer = rng.randint(0, 5)
        chat.blocks += self._new(answer)
        first = len(slots) if rng.random() < 0.7 else 0
        if rng.random() < 0.15:
            self._hint(chat.blocks)
        missing = chat.blocks[first:]
        if missing:
            parent = chat.blocks[first - 1] if first else None
            self._claim(subject.reserve(missing, parent, True, chat.tenant))
        subject.answered(chat.blocks, 16 * answer)
        if rng.random() < 0.9:
            self._end_one(latest=True)

    def _next_chat(self) -> Chat:
        rng = self._rng
        if not self._chats or rng.random() < 0.3:
            start = rng.choice([*self._shared, []])
            chat = Chat([*start, *self._new(rng.randint(1, 12))], rng.randrange(self._num_tenants))
            self._chats.append(chat)
            if len(self._chats) > 2 + self._num_slots // 12:
                self._chats.pop(rng.randrange(len(self._chats)))
            return chat
        at = min(rng.randrange(len(self._chats)), rng.randrange(len(self._chats)))
        chat = self._chats[-1 - at]
        if rng.random() < 0.1:  # another way from somewhere within
            chat = Chat(chat.blocks[: rng.randint(0, len(chat.blocks))], chat.tenant)
            self._chats.append(chat)
        chat.blocks += self._new(rng.randint(1, 6))
        if len(chat.blocks) > self._num_slots // 2:
            self._chats.remove(chat)
        return chat

    # -- leases ---------------------------------------------------------------------------------

    def _claim(self, lease: Any) -> None:
        if lease is None:
            self._note(-1)
            return
        self._note(*lease.slots.tolist(), -2, *lease.positions.tolist())
        self._open.append((lease, lease.purpose.value == "write"))
        if len(self._open) > 8:
            self._end_one()

    def _end_one(self, *, latest: bool = False) -> None:
        if not self._open:
            return
        rng = self._rng
        lease, writes = self._open.pop(-1 if latest else rng.randrange(len(self._open)))
        how = (
            ("commit" if writes else "release")
            if rng.random() < 0.95 or not self._fails
            else "fail"
        )
        failed: list[int] = []
        if how != "fail" and rng.random() < 0.03 and self._fails:
            failed = sorted(rng.sample(range(len(lease.slots)), rng.randint(1, len(lease.slots))))
        self._subject.end(lease, how, failed)

    # -- single calls ---------------------------------------------------------------------------

    def _singles(self) -> list[Callable[[], None]]:
        often = [self._end_one, self._copy, self._store_part, self._touch]
        seldom = [self._loose, self._disown, self._pin, self._unpin, self._evict_first]
        seldom += [self._drop, self._some_hint, self._coldest]
        return [*often * 4, *seldom, self._rarely]

    def _some(self) -> list[int]:
        if not self._chats:
            return list(self._shared[0])
        return self._rng.choice(self._chats).blocks

    def _copy(self) -> None:
        blocks = self._some()
        self._claim(self._subject.lease(blocks[: self._rng.randint(1, len(blocks))], True))

    def _store_part(self) -> None:
        blocks = self._some()
        first = self._rng.randrange(len(blocks))
        parent = blocks[first - 1] if first else None
        tenant = self._rng.randrange(self._num_tenants)
        self._claim(self._subject.reserve(blocks[first:], parent, True, tenant))

    def _loose(self) -> None:
        blocks = self._rng.sample(self._some(), 1) + self._new(self._rng.randint(1, 3))
        self._claim(self._subject.reserve(blocks, None, False, 0))

    def _touch(self) -> None:
        self._subject.touch(self._rng.choices(self._some(), k=self._rng.randint(0, 5)))

    def _disown(self) -> None:
        if self._open and self._fails:
            self._open[self._rng.randrange(len(self._open))][0].disown()

    def _pin(self) -> None:
        priority = self._rng.choice([None, 50, 70])
        seconds = self._rng.choice([2.0, 30.0])
        self._note(self._subject.pin(self._some(), seconds, priority))

    def _unpin(self) -> None:
        self._note(self._subject.unpin(self._some()))

    def _evict_first(self) -> None:
        blocks = self._some()
        self._subject.evict_first(
            blocks, self._rng.choice([0, 10, 20]), self._rng.choice([0, 0, len(blocks) // 2])
        )

    def _drop(self) -> None:
        self._note(self._subject.drop(self._some()))

    def _some_hint(self) -> None:
        self._hint(self._some())

    def _hint(self, blocks: list[int]) -> None:
        over = self._rng.random() < 0.5
        within = self._rng.choice([None, 1.0, 20.0])
        self._note(self._subject.hint(blocks, over, within))

    def _coldest(self) -> None:
        self._digest.update(b"".join(self._subject.coldest(self._rng.randint(1, 12))))

    def _rarely(self) -> None:
        dice = self._rng.random()
        if dice < 0.02:
            self._subject.reset()
        elif dice < 0.3:
            self._subject.grow(self._rng.randint(self._num_slots // 2, self._num_slots))
