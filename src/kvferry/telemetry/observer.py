"""Observers of requests, on a thread beside the engine's: the recorder and the memory curve.

The recorder writes requests as a trace that ``kvferry simulate`` reads, without any token. The
memory curve says what more memory would buy, from small pools fed with sampled blocks.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.replay import PoolReplay, Tokens
from kvferry.core.keys import Keys
from kvferry.hints import Hints
from kvferry.telemetry.traces import TraceWriter

log = logging.getLogger("kvferry")

_LOOK_SECONDS = 1.0
_BURST_SECONDS = 4e-3
"""Longest work between two rests. The first request finds nothing in the processor's caches and
costs several times what the next ones do. After 5 ms the interpreter is the engine's anyway."""
_REST = 19
"""It rests so many times as long as it worked: at most a twentieth of one processor is its."""
_MOST_REST = 1.0
_MOST_WAITING = 4096
_CLOSE_SECONDS = 1.0


class ObservedRequest:
    """Facts of one request; the scheduler adds the length of its answer when it ends.

    ``at`` is the scheduler's time. ``found_tokens`` of its ``tokens`` need not be computed.
    ``answer_tokens`` is None until it is over, and where it is not known.
    """

    __slots__ = (
        "_keys",
        "_num_keys",
        "answer_tokens",
        "at",
        "found_tokens",
        "hints",
        "is_over",
        "tokens",
    )

    def __init__(
        self,
        at: float,
        keys: Keys,
        num_keys: int,
        tokens: int,
        found_tokens: int,
        hints: Hints | None,
    ) -> None:
        """The first ``num_keys`` of the keys are those of its prompt."""
        self.at = at
        self._keys = keys
        self._num_keys = num_keys
        self.tokens = tokens
        self.found_tokens = found_tokens
        self.hints = hints
        self.answer_tokens: int | None = None
        self.is_over = False

    def end(self, answer_tokens: int | None) -> None:
        """The request is over."""
        # Another thread reads these: the length must be there before the flag.
        self.answer_tokens = answer_tokens
        self.is_over = True

    @property
    def keys(self) -> Keys:
        """One for each whole block of its prompt. Cut here, not on the engine's thread."""
        return self._keys[: self._num_keys]


class Student(Protocol):
    """Learns from requests, on the observer's thread alone."""

    needs_all: bool
    """Whether it must see what waits when the observer closes."""

    def learn(self, request: ObservedRequest) -> None:
        """Learn from one request; they come in order."""

    def idle(self) -> None:
        """Nothing waits at this moment: a time to put things in order."""

    def hurry(self) -> None:
        """More comes than can be looked at: make do with less of each."""

    def close(self) -> None:
        """No more will come."""


class Observer:
    """Hands requests to its students on a thread, which begins with the first request.

    :meth:`see` is all that the engine's thread does. Requests beyond its capacity are dropped and
    counted (``num_missed``). A student that raises is removed, with a line in the log.
    """

    def __init__(
        self,
        students: Sequence[Student],
        *,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """``pause`` is called with the seconds that it should rest."""
        self.num_missed = 0
        self._students = list(students)
        self._waiting: deque[ObservedRequest] = deque()
        self._stop = threading.Event()
        self._pause = pause if pause is not None else self._stop.wait
        self._thread: threading.Thread | None = None

    def see(self, request: ObservedRequest) -> None:
        """Take a request, without waiting."""
        if len(self._waiting) >= _MOST_WAITING:
            self.num_missed += 1
            return
        self._waiting.append(request)
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="kvferry-observer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End within a second. What waits is dropped, unless a student needs all. Safe twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._tell(lambda student: student.close())

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._look()
        for student in [student for student in self._students if not student.needs_all]:
            self._students.remove(student)
            self._call(student, lambda student: student.close())
        deadline = time.monotonic() + _CLOSE_SECONDS / 2
        while self._waiting and self._students and time.monotonic() < deadline:
            request = self._waiting.popleft()
            self._tell(lambda student: student.learn(request))  # noqa: B023

    def _look(self) -> None:
        worked = 0.0
        while self._waiting and self._students and not self._stop.is_set():
            if len(self._waiting) > _MOST_WAITING // 2:
                self._tell(lambda student: student.hurry())
                while len(self._waiting) > _MOST_WAITING // 4:
                    self._waiting.popleft()
                    self.num_missed += 1
            began = time.thread_time()
            request = self._waiting.popleft()
            self._tell(lambda student: student.learn(request))  # noqa: B023
            worked += time.thread_time() - began
            if worked >= _BURST_SECONDS:
                self._pause(min(_MOST_REST, _REST * worked))
                worked = 0.0
        self._tell(lambda student: student.idle())

    def _tell(self, what: Callable[[Student], None]) -> None:
        for student in tuple(self._students):
            self._call(student, what)

    def _call(self, student: Student, what: Callable[[Student], None]) -> None:
        try:
            what(student)
        except Exception:
            log.exception("%s stopped after an error of its own", type(student).__name__)
            if student in self._students:
                self._students.remove(student)


_LEAST_TOKENS = 128
"""Tokens of a recorded block, at least: one key for many short blocks keeps the file small."""

_ANSWER_SECONDS = 60.0
"""A request that is not over by then is written without the length of its answer."""

_SALT_BYTES = 32


class Recorder:
    """Writes a trace. Owns the file, a secret, and the requests whose answers it waits for.

    A key in the file is a digest of the real one under a secret that is never written and dies with
    the process: knowing a prompt does not help to find it there.
    """

    needs_all = True

    def __init__(self, path: Path, *, block_tokens: int, most_bytes: int, now: float) -> None:
        """``block_tokens`` is what a key of a request covers, ``now`` the scheduler's time."""
        self._every = -(-_LEAST_TOKENS // block_tokens)
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._offset = time.time() - now
        self._waiting: deque[ObservedRequest] = deque()
        self.writer = TraceWriter(
            path, block_tokens=self._every * block_tokens, most_bytes=most_bytes
        )

    def learn(self, request: ObservedRequest) -> None:
        self._waiting.append(request)
        self._write(before=request.at - _ANSWER_SECONDS)

    def idle(self) -> None:
        self._write(before=time.time() - self._offset - _ANSWER_SECONDS)
        self.writer.flush()

    def hurry(self) -> None:
        self._write(before=float("inf"))

    def close(self) -> None:
        self._write(before=float("inf"))
        self.writer.close()

    def _write(self, before: float) -> None:
        """Write requests that are over, and those that came before then, in their order."""
        while self._waiting:
            request = self._waiting[0]
            if not request.is_over and request.at >= before:
                return
            self._waiting.popleft()
            self.writer.write(
                request.at + self._offset,
                self._digests(request.keys),
                request.tokens,
                output_tokens=request.answer_tokens,
                hit_tokens=request.found_tokens,
                hints=request.hints,
            )

    def _digests(self, keys: Keys) -> bytes:
        rows = np.ascontiguousarray(keys.array[self._every - 1 :: self._every])
        raw, size = rows.tobytes(), rows.shape[1] * rows.itemsize
        return b"".join(
            blake2b(raw[at : at + size], digest_size=8, key=self._salt).digest()
            for at in range(0, len(raw), size)
        )


TIMES = (0.5, 1.0, 2.0, 4.0)
"""How many times the memory there is."""

_BLOCKS = 1024
"""Of the pool that stands for the memory there is. Fewer, and chance says more than the traffic."""
_LEAST_BLOCKS = 64
_FADE_BLOCKS = 1 << 16
"""Sampled blocks after which what was counted before counts half."""
_TELL_EVERY = 64
_LEAST_TOLD = 256
"""Blocks that must have come before anything is said."""

Points = Mapping[str, Mapping[float, float]]
"""By tier, by how many times its memory: the share of prompt tokens found."""


@dataclass(frozen=True)
class TierSizes:
    """One tier: how many blocks it and all above it hold, for each of ``TIMES`` its own memory.

    ``policy`` is what it has instead of the host's; one that ``feeds_below`` lets go otherwise.
    """

    name: str
    blocks: tuple[float, ...]
    policy: EvictionPolicyMaker | None = None
    feeds_below: bool = False


class MemoryCurve:
    """Owns the small pools of every tier, and the points of the curve as of the last look.

    A block is looked at if its key says so, one in so many, wherever it comes up: the sampled
    blocks of a request are a chain of their own. A pool of as small a share of the real one, with
    the real policy, then hits as the real one does (a miniature simulation); pools for half, twice
    and four times the memory say what those would hit. A block that all requests share counts for
    much and is either sampled or not: so what is missing of the sample (or is too much) counts as
    hits (or does not), as in SHARDS.
    """

    needs_all = False

    def __init__(
        self, tiers: Sequence[TierSizes], policy: EvictionPolicyMaker, *, block_tokens: int
    ) -> None:
        self.points: Points = MappingProxyType({})
        """Replaced as a whole: any thread may read it."""
        self._tiers = [TierCurve(tier, policy, block_tokens) for tier in tiers]
        self._num_news = 0

    def learn(self, request: ObservedRequest) -> None:
        for tier in self._tiers:
            tier.learn(request)
        self._num_news += 1
        if self._num_news >= _TELL_EVERY:
            self.idle()

    def idle(self) -> None:
        if self._num_news:
            points = {tier.name: MappingProxyType(tier.points()) for tier in self._tiers}
            self.points = MappingProxyType({name: each for name, each in points.items() if each})
            self._num_news = 0

    def hurry(self) -> None:
        for tier in self._tiers:
            tier.halve()

    def close(self) -> None:
        self._tiers.clear()


class TierCurve:
    """One tier's small pools. Owns them, and what was counted."""

    def __init__(self, tier: TierSizes, policy: EvictionPolicyMaker, block_tokens: int) -> None:
        self.name = tier.name
        self._blocks = tier.blocks
        self._policy = tier.policy or policy
        self._feeds_below = tier.feeds_below
        self._block_tokens = block_tokens
        self._begin(min(1.0, _BLOCKS / tier.blocks[TIMES.index(1.0)]))

    def _begin(self, share: float) -> None:
        self.share = share
        self._below = np.uint64(min(math.ceil(share * 2**32), 2**32))
        self._pools = [
            PoolReplay(max(1, round(blocks * share)), self._policy) for blocks in self._blocks
        ]
        for replay in self._pools:
            replay.pool.eviction.feeds_below = self._feeds_below
        self._hits = [0.0] * len(TIMES)
        self._sampled = self._asked = self._tokens = 0.0

    def halve(self) -> None:
        """Look at half as many blocks from now on; what was learned so far goes."""
        if self.share * self._blocks[TIMES.index(1.0)] >= 2 * _LEAST_BLOCKS:
            self._begin(self.share / 2)

    def learn(self, request: ObservedRequest) -> None:
        keys = request.keys
        self._asked += len(keys)
        self._tokens += max(request.tokens, len(keys) * self._block_tokens)
        if self.share < 1:
            chosen = (keys.array[:, 2] >> np.uint64(32)) < self._below
            keys = keys.take(np.flatnonzero(chosen))
        if not len(keys):
            return
        tokens = Tokens(request.tokens, request.answer_tokens or 0)
        evidence = evidence_of(request.hints)
        self._sampled += len(keys)
        for at, pool in enumerate(self._pools):
            self._hits[at] += sum(pool.serve(keys, len(keys), request.at, evidence, tokens))
        if self._sampled > _FADE_BLOCKS:
            self._hits = [hits / 2 for hits in self._hits]
            self._sampled, self._asked = self._sampled / 2, self._asked / 2
            self._tokens /= 2

    def points(self) -> dict[float, float]:
        """The share of prompt tokens found, by how many times the memory; empty if too little."""
        expected = self._asked * self.share
        if self._sampled < _LEAST_TOLD or expected <= 0:
            return {}
        whole = self._asked * self._block_tokens / self._tokens
        found = [(hits + expected - self._sampled) / expected * whole for hits in self._hits]
        # More memory never hurts here as much as chance does.
        rising = np.maximum.accumulate(np.clip(found, 0.0, 1.0)).tolist()
        return dict(zip(TIMES, rising, strict=True))


def evidence_of(hints: Hints | None) -> Evidence | None:
    """The part of a request's hints that policies learn from, if there is any."""
    if hints is None or not (hints.ended or hints.continues):
        return None
    return Evidence(ended=hints.ended, continues=hints.continues, within=hints.within)
