"""Answers how much of a request is here, and remembers why it was no more.

::

    asked ──┬─> asked the same before, and nothing was stored since: the same answer
            ├─> the very next slot is not here: a miss, the short way
            └─> a look over all groups ──┬─> the rest lies below the host: brought up, wait
                                         └─> pinned, or left alone where computing is faster
"""

from __future__ import annotations

from kvferry import reach
from kvferry.answers import Match, MatchState
from kvferry.keys import Keys
from kvferry.policy import SeenOften
from kvferry.pool import Pool
from kvferry.scheduler.explainer import Explainer
from kvferry.scheduler.hits import Hits
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.matching import Look, Matcher, Missing
from kvferry.scheduler.request import RequestRecord
from kvferry.scheduler.requests import Requests
from kvferry.scheduler.why import Explanation
from kvferry.stats import MatchCounts
from kvferry.types import RequestId


class Lookups:
    """Owns what was counted of look-ups; a pinned hit is its request's, what comes up the levels'.

    Explains every look-up once into the journal.
    """

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        hits: Hits,
        lower: LowerLevels,
        requests: Requests,
        journal: Journal,
        admission: SeenOften,
    ) -> None:
        self.counts = MatchCounts()
        self._matcher = matcher
        self._pool = pool
        self._hits = hits
        self._lower = lower
        self._requests = requests
        self._journal = journal
        self._admission = admission
        self._explainer = Explainer(matcher, pool, admission)

    def close(self) -> None:
        self._explainer.close()

    def match(
        self,
        request_id: RequestId,
        keys: Keys,
        *,
        computed_tokens: int,
        max_tokens: int,
        spare_tokens: int,
    ) -> Match:
        """As ``Scheduler.match``, for at most as many tokens as there are keys."""
        record = self._requests.record(request_id)
        if record.loading is not None or record.promoting:
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        if not computed_tokens:  # it has no block at all, so none from before a reset
            record.renew()
        hit = record.hit
        if hit is None or not self._hits.still_holds(hit, computed_tokens, max_tokens):
            record.let_go()
            if self._misses(request_id, record, keys, computed_tokens, max_tokens):
                return Match(MatchState.MISS, computed_tokens, computed_tokens)
            look = self._matcher.look(keys, computed_tokens, max_tokens, spare_tokens)
            if self._ask(request_id, record, look) or self._promote(request_id, record, look):
                return Match(MatchState.WAIT, computed_tokens, computed_tokens)
            hit, decision = self._hits.pin(look)
            record.hit = hit
            self._remember(record, self._explainer.explain(request_id, look, decision))
        if hit.match.state is MatchState.HIT and not self._hits.may_load(hit):
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        return hit.match

    def _misses(
        self,
        request_id: RequestId,
        record: RequestRecord,
        keys: Keys,
        computed_tokens: int,
        max_tokens: int,
    ) -> bool:
        """Whether one slot that every hit needs is not here; explained once for each question."""
        asked = (self._pool.generation, computed_tokens, max_tokens)
        if record.missed == asked:
            return True
        self._count_once(record, keys, max_tokens - computed_tokens)
        missing = self._matcher.next_missing(keys, computed_tokens, max_tokens)
        if missing is None:
            return False
        if record.missed is None or record.missed[1:] != asked[1:]:
            why = self._explainer.explain_miss(
                request_id, missing, computed_tokens=computed_tokens, max_tokens=max_tokens
            )
            self._remember(record, why)
        record.missed = asked
        return True

    def note_miss(
        self,
        request_id: RequestId,
        keys: Keys,
        missing: Missing,
        *,
        computed_tokens: int,
        max_tokens: int,
    ) -> None:
        """Count and explain a look-up that was answered with ``next_missing`` alone."""
        record = self._requests.record(request_id)
        self._count_once(record, keys, max_tokens - computed_tokens)
        why = self._explainer.explain_miss(
            request_id, missing, computed_tokens=computed_tokens, max_tokens=max_tokens
        )
        self._remember(record, why)

    def _ask(self, request_id: RequestId, record: RequestRecord, look: Look) -> bool:
        """Ask what lies below where that is not known; True if the request should wait for it."""
        if record.asked or not self._lower.can_be_asked:
            return False
        keys = self._matcher.to_ask(look)
        questions = self._lower.ask(keys) if len(keys) else set()
        self._requests.wait(request_id, questions)
        record.promoting |= questions
        record.asked = bool(questions)
        return record.asked

    def _promote(self, request_id: RequestId, record: RequestRecord, look: Look) -> bool:
        """Start bringing up what lies below the host; True if the request should wait for it."""
        if look.all_tokens <= look.host_tokens or record.promoted:
            return False
        look = self._matcher.within(look, self._lower.room)
        for g, keys, parent in self._matcher.to_promote(look):
            chained = isinstance(self._matcher.groups[g], reach.FullAttention)
            record.promoting |= self._lower.promote(keys, parent=parent, chained=chained)
        self._requests.wait(request_id, record.promoting)
        record.promoted = bool(record.promoting)
        self.counts.promoted_tokens += look.all_tokens - look.host_tokens if record.promoted else 0
        return record.promoted

    def _remember(self, record: RequestRecord, explanation: Explanation) -> None:
        if explanation.decision is not None:
            self.counts.verdicts[explanation.decision.verdict.value] += 1
        if not record.explained:  # once for each request, however often it asks again
            record.explained = True
            self._journal.begin(explanation.request_id)
            self.counts.missed[explanation.reason.value] += 1
        self._journal.explained(explanation)

    def _count_once(self, record: RequestRecord, keys: Keys, num_tokens: int) -> None:
        if record.counted:
            return
        record.counted = True
        self.counts.queries += 1
        self.counts.asked_tokens += max(0, num_tokens)
        if self._admission.counts:
            for g in range(len(self._matcher.groups)):
                self._admission.see(self._matcher.all_keys(g, keys))
