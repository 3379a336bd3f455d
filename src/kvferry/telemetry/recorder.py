"""Writes requests down as a trace that ``kvferry simulate`` reads: no tokens, nothing to guess."""

from __future__ import annotations

import secrets
from collections import deque
from hashlib import blake2b
from pathlib import Path
from time import time as wall_time

import numpy as np

from kvferry.core.keys import Keys
from kvferry.hints import Hints
from kvferry.telemetry.traces import TraceWriter


class ObservedRequest:
    """Facts of one request. Owned by whoever observes; the scheduler adds its answer at its end.

    ``at`` is the scheduler's time. ``found_tokens`` of its ``tokens`` need not be computed: those
    on the device, in host memory and below it. ``answer_tokens`` is None until it is over, and
    where nobody knows.
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
        """It is over. Another thread looks on: what it may write comes before that it may."""
        self.answer_tokens = answer_tokens
        self.is_over = True

    @property
    def keys(self) -> Keys:
        """One for each whole block of its prompt. Cut by whoever asks, not by the engine."""
        return self._keys[: self._num_keys]


# ------------------------------------------------------------------------------------------------
# Writes requests down as a trace that ``kvferry simulate`` reads: no tokens, nothing to guess.

_LEAST_TOKENS = 128
"""A recorded block has at least so many: one key for many short ones keeps the file small."""

_ANSWER_SECONDS = 60.0
"""A request that is not over by then is written without the length of its answer."""

_SALT_BYTES = 32


class Recorder:
    """Owns the file, a secret, and the requests whose answers it waits for.

    A key in the file is a digest of the real one under a secret that is never written and dies with
    the process: who knows a prompt cannot look it up there.
    """

    def __init__(self, path: Path, *, block_tokens: int, most_bytes: int, now: float) -> None:
        """``block_tokens`` is what a key of a request covers, ``now`` the scheduler's time."""
        self._every = -(-_LEAST_TOKENS // block_tokens)
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._offset = wall_time() - now
        self._waiting: deque[ObservedRequest] = deque()
        self.writer = TraceWriter(
            path, block_tokens=self._every * block_tokens, most_bytes=most_bytes
        )

    def learn(self, request: ObservedRequest) -> None:
        self._waiting.append(request)
        self._write(before=request.at - _ANSWER_SECONDS)

    def idle(self) -> None:
        self._write(before=wall_time() - self._offset - _ANSWER_SECONDS)
        self.writer.flush()

    def hurry(self) -> None:
        self._write(before=float("inf"))

    def close(self) -> None:
        self._write(before=float("inf"))
        self.writer.close()

    def _write(self, before: float) -> None:
        """Those that are over, and those that came before then; in the order in which they came."""
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
