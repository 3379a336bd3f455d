"""What look-ups are counted and explained as: once for each request, however often it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.config import Config
from kvferry.keys import Keys
from kvferry.observed.curve import Points
from kvferry.policy import OverlapDecision, SeenOften
from kvferry.pool import Pool
from kvferry.scheduler.explainer import Explainer
from kvferry.scheduler.hearing import Hearing
from kvferry.scheduler.hit import PinnedHit
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.look import Missing
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.observing import Observing, observing
from kvferry.scheduler.on_device import OnDevice
from kvferry.scheduler.why import Explanation
from kvferry.stats import MatchCounts
from kvferry.tenants import Tenants

if TYPE_CHECKING:
    from kvferry.scheduler.request import Request


class Accounts:
    """Owns what was counted of look-ups; the journal remembers what was said of each."""

    def __init__(
        self,
        matcher: Matcher,
        explainer: Explainer,
        journal: Journal,
        admission: SeenOften,
        lower: LowerLevels,
        tenants: Tenants | None = None,
        hearing: Hearing | None = None,
        on_device: OnDevice | None = None,
    ) -> None:
        self.counts = MatchCounts()
        self._matcher = matcher
        self._explainer = explainer
        self._journal = journal
        self._admission = admission
        self._lower = lower
        self._counts_below = lower.counts_asked
        self._tenants = tenants
        self._hearing = hearing
        self._on_device = on_device
        self.observing: Observing | None = None
        """Who learns from requests, if anybody does."""

    def close(self) -> None:
        self._explainer.close()
        if self._hearing is not None:
            self._hearing.tell()
        if self.observing is not None:
            self.observing.close()

    def watch(self, config: Config, pool: Pool, clock: Callable[[], float]) -> None:
        """Let others learn from every request, as the settings say."""
        self.observing = observing(config, pool, self._lower.levels, self._matcher, clock)
        hearing, students = self._hearing, self.observing
        if hearing is not None and hearing.is_late and students and not students.wants_ends:
            hearing.also = students.note  # a request's keys are made once, then

    @property
    def memory_curve(self) -> Points:
        """What other sizes of each tier would hit, as far as is known."""
        return self.observing.curve if self.observing is not None else {}

    def asked(self, request: Request, keys: Keys | None, num_tokens: int) -> None:
        """A request asked for so many tokens more than it has, the first time that it asks.

        ``keys`` may be left out where it does not matter how often a block is asked for.
        """
        request.is_counted = True
        self.counts.queries += 1
        self.counts.asked_tokens += max(0, num_tokens)
        if self._tenants is not None:
            counts = self._tenants.counts(request.tenant)
            counts.queries += 1
            counts.asked_tokens += max(0, num_tokens)
        if keys is not None and (self._admission.counts or self._counts_below):
            for g in range(len(self._matcher.groups)):
                slot_keys = self._matcher.all_keys(g, keys)
                self._admission.see(slot_keys)
                self._lower.asked(slot_keys)

    def loaded(self, request: Request, num_tokens: int, overlap: OverlapDecision | None) -> None:
        """So many tokens are brought to the device for a request."""
        self.counts.hit_tokens += num_tokens
        if overlap is not None:
            self.counts.overlaps[overlap.verdict.value] += 1
            self._journal.overlapped(request.id, overlap.words)
        if self._tenants is not None:
            self._tenants.counts(request.tenant).hit_tokens += num_tokens

    def found(self, request: Request, hit: PinnedHit) -> None:
        """A request was looked up, and this is all of it that is here."""
        decision = hit.decision
        if decision is not None:
            self.counts.verdicts[decision.verdict.value] += 1
        below = request.below
        asked = (below.num_asked, below.declined) if below is not None else (0, None)
        self._explained(request, self._explainer.explain(request.id, hit, *asked))

    def missed(
        self, request: Request, missing: Missing, *, computed_tokens: int, max_tokens: int
    ) -> None:
        """A request found nothing, for want of this block; the reason is that of now."""
        self._explained(
            request,
            self._explainer.explain_miss(
                request.id, missing, computed_tokens=computed_tokens, max_tokens=max_tokens
            ),
        )

    def ended(self, request: Request) -> None:
        """A request is over, whatever of it is still to be stored."""
        if self._hearing is not None:
            self._hearing.ended(request)

    def gone(self, request: Request) -> None:
        """Nothing of a request is to be stored any more."""
        if self.observing is not None and self.observing.wants_ends:
            self.observing.ended(request)
        if self._on_device is not None:
            self._on_device.ended(request)

    def told(self, request: Request, explanation: Explanation) -> None:
        """A request was answered without a look, for this reason."""
        self._explained(request, explanation)

    def _explained(self, request: Request, explanation: Explanation) -> None:
        is_new = not request.is_explained
        if is_new:
            request.is_explained = True
            self.counts.missed[explanation.reason.value] += 1
            hearing = self._hearing
            if self.observing is not None and (hearing is None or hearing.also is None):
                self.observing.answered(request, explanation)
            if hearing is not None:
                hearing.asked(request, explanation)
        self._journal.explained(explanation, is_new=is_new)
