"""When a step of vLLM's may go by without a look at anything."""

from __future__ import annotations

from typing import Any

LONG_TOKENS = 512
"""Who computes so many in its first step is looked at in that step: where vLLM evicts, a request
stores that many at a time."""

_MOST_QUIET = 32
"""Decoding steps that may go by without a look at anything: a fraction of a second."""

_MOST_CALM = 4
"""Steps in a row that bring requests and are not looked at further: where some come with every
step, there is no better one."""


class Pace:
    """Counts the steps that may still be skipped. Owns two numbers.

    *Quiet* steps only decode one more token of each request. *Calm* ones also bring requests that
    were answered at once and can be counted later: requests come where others end, and then the GPU
    waits for vLLM's scheduler; a step later, while it decodes, vLLM waits for the GPU.
    """

    __slots__ = ("_num_calm", "_num_quiet")

    def __init__(self) -> None:
        self._num_quiet = 0
        self._num_calm = 0

    @property
    def is_quiet(self) -> bool:
        """Whether the next step may be one that is not looked at."""
        return self._num_quiet > 0

    def disturb(self) -> None:
        """Something happened: the next step is no quiet one."""
        self._num_quiet = 0

    def look_next(self) -> None:
        """The next step is looked at, whoever comes in it."""
        self._num_quiet = self._num_calm = 0

    def looked(self, num_tokens: int) -> None:
        """A step was looked at; so many tokens each request may compute before the next look."""
        self._num_quiet = min(num_tokens, _MOST_QUIET)
        self._num_calm = _MOST_CALM

    def skips_quiet(self, step: Any) -> bool:
        """Whether all this step does is to decode one more token of each running request.

        Most steps do no more, and must cost next to nothing. So only the step itself is looked at:
        whatever else would be news to us ends the quiet, or can wait for the next full look.
        """
        num_running = len(step.num_scheduled_tokens)
        if (
            self._num_quiet <= 0
            or num_running == 0  # a step of its own kind: what waits has its moment
            or step.total_num_scheduled_tokens != num_running
            or step.scheduled_new_reqs
            or step.preempted_req_ids
        ):
            return False
        self._num_quiet -= 1
        return True

    def may_be_calm(self, step: Any) -> bool:
        """Whether this step brings requests, and nobody is taken off the device in it."""
        return bool(self._num_calm and step.scheduled_new_reqs and not step.preempted_req_ids)

    def skip_calm(self) -> None:
        """A calm step went by."""
        self._num_calm -= 1
