"""One request as the scheduler saw it: its keys, its lengths, what was found of it."""

from __future__ import annotations

from kvferry.hints import Hints
from kvferry.keys import Keys


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
