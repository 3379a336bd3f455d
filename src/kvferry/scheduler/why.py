"""Why a request got no more than it did: a short answer a program can read."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvferry.policy import Decision
from kvferry.types import RequestId


class Reason(Enum):
    """Why the first token that could not be had from here could not."""

    NOTHING_MISSED = "nothing_missed"  # all that was asked for could be had
    EVICTED = "evicted"  # it was here; the room was needed, or a copy of it failed
    NEVER_STORED = "never_stored"  # nobody computed it yet, or it found no room
    BELOW_THRESHOLD = "below_threshold"  # not asked for often enough to be stored
    IN_FLIGHT = "in_flight"  # its bytes are still on their way in
    OTHER_NAMESPACE = "other_namespace"  # stored before a reset or a change of weights
    STILL_BELOW = "still_below"  # on a lower level, and not brought up in time
    LEVEL_AWAY = "level_away"  # on a lower level that cannot be used now
    LOAD_SLOWER = "load_slower"  # it is here or below, but computing it was judged faster
    TOLD_NOT_TO = "told_not_to"  # a hint said that nothing is to be loaded for this request


class Explanation(NamedTuple):
    """What one request could be given when it was looked up, and why no more.

    ``device_tokens`` the engine had, ``host_tokens`` more could be loaded, of ``asked_tokens`` in
    all; ``lower_tokens`` of those asked for lay only below the host. ``first_missing`` is the first
    token not to be had, in ``group``. Levels that know keys themselves were asked for
    ``asked_blocks`` of it; ``levels_away`` names those that could not be used, and why.
    """

    request_id: RequestId
    asked_tokens: int
    device_tokens: int
    host_tokens: int
    lower_tokens: int
    reason: Reason
    first_missing: int | None = None
    group: int | None = None
    decision: Decision | None = None
    asked_blocks: int = 0
    levels_away: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        plain: dict[str, object] = {**self._asdict(), "reason": self.reason.value}
        if self.decision is not None:
            verdict = self.decision.verdict.value
            plain["decision"] = {**self.decision._asdict(), "verdict": verdict}
        return plain
