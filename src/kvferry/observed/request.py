"""One request as the scheduler saw it: its keys, its lengths, what was found of it."""

from __future__ import annotations

from kvferry.hints import Hints
from kvferry.keys import Keys


class ObservedRequest:
    """Facts of one request. Owned by whoever observes; the scheduler adds its answer at its end.

    ``at`` is the scheduler's time. ``found_tokens`` of its ``tokens`` need not be computed: those
    on the device, in host memory and below it. ``answer_tokens`` is None until it is over.
    """

    __slots__ = ("answer_tokens", "at", "found_tokens", "hints", "keys", "tokens")

    def __init__(
        self, at: float, keys: Keys, tokens: int, found_tokens: int, hints: Hints | None
    ) -> None:
        self.at = at
        self.keys = keys
        self.tokens = tokens
        self.found_tokens = found_tokens
        self.hints = hints
        self.answer_tokens: int | None = None
