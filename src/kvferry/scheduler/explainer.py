"""Finds out why a look-up ended where it did."""

from __future__ import annotations

from kvferry.identity import scope
from kvferry.keys import Keys, masked_key
from kvferry.policy import Decision, SeenOften
from kvferry.pool import Pool
from kvferry.scheduler.ghosts import Ghosts
from kvferry.scheduler.hit import PinnedHit
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.look import Missing
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.why import Explanation, Reason
from kvferry.types import RequestId


class Explainer:
    """Explains looks. Owns the memory of what was here once; changes nothing else."""

    def __init__(
        self, matcher: Matcher, pool: Pool, admission: SeenOften, lower: LowerLevels
    ) -> None:
        self.has_levels = bool(lower)
        self._matcher = matcher
        self._lower = lower
        self._pool = pool
        self._admission = admission
        self._ghosts = Ghosts(pool.num_slots)
        pool.listeners.append(self._ghosts.add)

    def close(self) -> None:
        self._pool.listeners.remove(self._ghosts.add)

    def explain(
        self,
        request_id: RequestId,
        hit: PinnedHit,
        asked_blocks: int = 0,
        declined: Decision | None = None,
    ) -> Explanation:
        """``asked_blocks`` of it levels were asked for; ``declined`` what they had, for speed."""
        look, decision = hit.look, hit.decision
        missing = look.missing
        if decision is not None and hit.is_declined:
            reason, group, token = Reason.LOAD_SLOWER, None, look.computed_tokens
        elif declined is not None and missing is not None:
            reason, group, token = Reason.LOAD_SLOWER, missing.group, missing.token
            decision = declined
        elif missing is None:
            reason, group, token = Reason.NOTHING_MISSED, None, None
        else:
            group, token = missing.group, missing.token
            below = look.all_tokens > look.host_tokens
            reason = Reason.STILL_BELOW if below else self._why_missing(missing)
        return Explanation(
            request_id=request_id,
            asked_tokens=look.max_tokens,
            device_tokens=look.computed_tokens,
            host_tokens=look.host_tokens - look.computed_tokens,
            lower_tokens=look.all_tokens - look.host_tokens,
            reason=reason,
            first_missing=token,
            group=group,
            decision=decision,
            asked_blocks=asked_blocks,
            levels_away=self._lower.away if self.has_levels else (),
        )

    def explain_miss(
        self,
        request_id: RequestId,
        missing: Missing,
        *,
        computed_tokens: int,
        max_tokens: int,
    ) -> Explanation:
        """Nothing could be had because of this one slot."""
        return Explanation(
            request_id=request_id,
            asked_tokens=max_tokens,
            device_tokens=computed_tokens,
            host_tokens=0,
            lower_tokens=0,
            reason=self._why_missing(missing),
            first_missing=missing.token,
            group=missing.group,
            decision=None,
        )

    def _why_missing(self, missing: Missing) -> Reason:
        group, key = missing.group, missing.key
        if missing.is_coming:
            return Reason.IN_FLIGHT
        if self.has_levels and self._lower.has_out_of_reach(key):
            return Reason.LEVEL_AWAY
        if self._ghosts.has(key):
            return Reason.EVICTED
        if self._admission.counts and not self._admission.admits(Keys.from_bytes((key,)))[0]:
            return Reason.BELOW_THRESHOLD
        before = self._matcher.epoch_before
        if before is not None:
            bare = masked_key(key, scope(self._matcher.epoch, group))
            if self._ghosts.has(masked_key(bare, scope(before, group))):
                return Reason.OTHER_NAMESPACE
        return Reason.NEVER_STORED
