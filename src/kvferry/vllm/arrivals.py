"""Requests of which we have nothing: answered at once, told to our scheduler when there is time.

::

    match ──> the next block is not with us: a miss ──> allocated ──> runs ──> told
              one look for one key                      in calm steps          in a step that only
                                                                               decodes

Requests come where others end, and then the GPU waits for vLLM's scheduler; a step later, while it
decodes, vLLM waits for the GPU. A conversation whose history never left the device is the usual
case, so it costs its step no more than the look. Whatever else touches a request that is not told
yet (it ends, is asked about again, is preempted; everything is forgotten) has it told before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.config import Config
from kvferry.scheduler import Missing, Scheduler
from kvferry.vllm import translate
from kvferry.vllm.storing import Storing
from kvferry.vllm.tracked import Tracked

_LONG_TOKENS = 512
"""Who computes so many in its first step is looked at in that step: where vLLM evicts, a request
stores that many at a time."""

_MOST_CALM = 4
"""Steps in a row that bring requests and are not looked at further: where some come with every
step, there is no better one."""


@dataclass(eq=False)
class _Untold:
    """A request that was answered and that our scheduler does not know.

    It was asked about with ``num_hashes`` blocks; by the time it is told it may have more.
    """

    tracked: Tracked
    missing: Missing
    num_hashes: int
    computed_tokens: int
    max_tokens: int
    has_blocks: bool = False


class Arrivals(Storing):
    """Owns who is not told yet; leaves requests that we may have something of to others."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, support: translate.Support
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, config, support)
        self._untold: dict[str, _Untold] = {}
        self._num_calm = 0

    # -- a request comes ------------------------------------------------------------------------

    def _misses(self, scheduler: Scheduler, request: Any, computed_tokens: int) -> bool:
        """Whether a new request finds nothing, for want of the very next block; then it waits here.

        If it may find something, nothing is remembered.
        """
        tracked = Tracked(request, self._namespace)
        max_tokens = self._claimable(request, computed_tokens)
        missing = scheduler.next_missing(
            tracked.chain, computed_tokens=computed_tokens, max_tokens=max_tokens
        )
        if missing is None:
            return False
        tracked.computed_tokens = tracked.past_tokens = computed_tokens
        self._tracked[request.request_id] = tracked
        self._untold[request.request_id] = _Untold(
            tracked, missing, len(tracked.chain), computed_tokens, max_tokens
        )
        return True

    def _claimable(self, request: Any, computed_tokens: int) -> int:
        """How far a hit may go. One token must be computed, or there is none to sample from.

        vLLM computes the last token again where a load brings all of them. That is a step of one
        token, as in decoding, where the end of a block would be a prefill; but for what is on the
        device but for its last block, waiting for a load is not worth it.
        """
        rest = request.num_tokens - 1
        is_whole = self._claims_whole and computed_tokens + self._least_block <= rest
        return int(request.num_tokens if is_whole else rest)

    def _note_blocks(self, request: Any) -> bool:
        """vLLM has given a request its blocks, and nothing is to load; False if it is told."""
        untold = self._untold.get(request.request_id)
        if untold is None:
            return False
        untold.has_blocks = True
        return True

    # -- it is told -----------------------------------------------------------------------------

    def _begin(self, scheduler: Scheduler, request_id: str) -> None:
        if not scheduler.begin(request_id):  # one of this name has left something
            self._end_namesake(scheduler, request_id)
            scheduler.begin(request_id)

    def _tell(self, scheduler: Scheduler, request_id: str) -> None:
        """Have our scheduler know a request, if it does not."""
        untold = self._untold.pop(request_id, None)
        if untold is None:
            return
        tracked = untold.tracked
        self._begin(scheduler, request_id)
        scheduler.note_miss(
            request_id,
            tracked.chain.keys()[: untold.num_hashes],
            untold.missing,
            computed_tokens=untold.computed_tokens,
            max_tokens=untold.max_tokens,
        )
        tracked.next_store = tracked.past_tokens + self._step + self._volatile
        if untold.has_blocks:
            self._go_on(scheduler, tracked)

    def _tell_all(self, scheduler: Scheduler) -> None:
        self._num_calm = _MOST_CALM
        for request_id in tuple(self._untold):
            self._tell(scheduler, request_id)

    def _forget(self, scheduler: Scheduler) -> None:
        # Told before: what a reset is about is what every request has computed so far.
        self._tell_all(scheduler)
        super()._forget(scheduler)
        self._look_next()  # the ranks must hear of the epoch

    # -- a step ---------------------------------------------------------------------------------

    def _is_calm(self, scheduler_output: Any) -> bool:
        """Whether all that is new in this step are requests that can be told later.

        Others may decode; who prefills a long prompt stores it as it goes. Nothing else may be
        urgent: what is to be sent, whose blocks are held or may soon be gone, who is being timed.
        """
        new = scheduler_output.scheduled_new_reqs
        scheduler, leftovers = self.scheduler, self.leftovers
        if not (new and self._num_calm > 0 and self._untold) or self.guard.broken:
            return False
        if scheduler is None or scheduler.num_queued or scheduler_output.preempted_req_ids:
            return False
        if leftovers is None or self._times_prefills or self.config.store_mode == "lazy":
            return False
        if leftovers.holds_some or (leftovers and not leftovers.can_wait):
            return False
        num_scheduled = scheduler_output.num_scheduled_tokens
        num_others = scheduler_output.total_num_scheduled_tokens
        for data in new:
            num_tokens = num_scheduled.get(data.req_id, 0)
            if data.req_id not in self._untold or num_tokens >= _LONG_TOKENS:
                return False
            num_others -= num_tokens
        return bool(num_others == len(num_scheduled) - len(new))

    def _let_run(self, scheduler_output: Any) -> None:
        """A calm step: note of its new requests what cannot be noted later."""
        self._num_calm -= 1
        for data in scheduler_output.scheduled_new_reqs:
            self._untold[data.req_id].tracked.has_run = True
        for untold in self._untold.values():
            self._time(untold.tracked)

    def _look_next(self) -> None:
        """This step is not a calm one, whoever comes in it."""
        self._num_calm = 0
