"""The health of a shared store, for reads and for writes, judged by its answers and by probes.

Both are judged apart. A store that is full, throttles writes or refuses them (a quota, a read-only
bucket) is still read.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from kvferry.errors import words_of
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault, NotAttempted, StoreClient, Unavailable

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0
PROBE_SECONDS = 2.0

End = Unavailable | Fault | None
"""The result of one block; None: it moved, or was found."""


class CircuitBreaker:
    """Owns whether the store may be called, why not, and when to probe it next.

    ::

        closed ── a whole batch failed by the store's fault ──> open ── a probe succeeded ──> closed
                                                                 └── a probe failed: wait longer

    A successful probe does not yet make the next wait short again: only batches do, and of the way
    that failed. A store that serves probes or lookups, but no blocks, is called less and less
    often. ``now`` is ``time.monotonic``; ``jitter`` keeps a fleet's servers from probing in step.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.ailment = ""
        self.probe_at = 0.0
        self.wait = FIRST_WAIT
        """Seconds to the next probe after the next failure, at most."""
        self._failed: set[Way] = set()
        self._jitter = jitter

    def failed(self, reason: str, now: float, way: Way | None = None) -> None:
        """Open after a whole batch of this way, or a probe (no way), failed by a store's fault."""
        if way is not None:
            self._failed.add(way)
        self.ailment = reason or "out of order"
        self.probe_at = now + self.wait * (0.5 + 0.5 * self._jitter())
        self.wait = min(2 * self.wait, LONGEST_WAIT)

    def probed(self) -> None:
        self.ailment = ""

    def worked(self, way: Way) -> None:
        self._failed.discard(way)
        if not self._failed:
            self.wait = FIRST_WAIT


class StoreHealth:
    """Owns one circuit breaker for reads and lookups, one for writes, and the probes."""

    def __init__(
        self, client: StoreClient, report: Callable[[Way, str], None], *, refuses: str = ""
    ) -> None:
        """``report`` receives why the store cannot be read or written, whenever that changes.

        ``refuses``, if given, is why nothing is ever written.
        """
        self.reads, self.writes = CircuitBreaker(), CircuitBreaker()
        self._client = client
        self._report = report
        self._answered_at = dict.fromkeys(Way, float("-inf"))
        if refuses:
            self.writes.ailment, self.writes.probe_at = refuses, float("inf")

    def _breaker(self, way: Way) -> CircuitBreaker:
        return self.writes if way is Way.WRITE else self.reads

    def ailment(self, way: Way) -> str:
        """Return why the store should not be called this way; empty while it may be."""
        return self._breaker(way).ailment

    def answered(self, way: Way, answers: Sequence[object]) -> None:
        if not all(isinstance(each, Fault) for each in answers):
            self._answered_at[way] = time.monotonic()

    def judge(self, way: Way, ends: Sequence[End], began: float) -> None:
        """Open the circuit breaker after a batch with faults and no answer.

        A store that hangs holds as many blocks as may be asked for at once. Blocks that wait behind
        them are not attempted, which is no answer. But a busy store may reach a batch too late to
        answer any of it. Then answers to other batches meanwhile keep the breaker closed.
        """
        faults = [end for end in ends if isinstance(end, Fault)]
        done = sum(end is None for end in ends)
        missing = sum(
            isinstance(end, Unavailable) and not isinstance(end, NotAttempted) for end in ends
        )
        answers = done if way is Way.WRITE else done + missing
        is_silent = self._answered_at[way] <= began
        breaker = self._breaker(way)
        if faults and not answers and is_silent and not breaker.ailment:
            breaker.failed(faults[0].reason, time.monotonic(), way)
            self._report(way, breaker.ailment)
        elif not faults and (answers if way is Way.FIND else done):
            breaker.worked(way)

    async def watch(self, first: Callable[[], None]) -> None:
        """Probe the store once, then for ever the directions whose circuit breakers are open.

        ``first`` is called when the first probe has ended, whether it succeeded or not.
        """
        await self.probe(Way.READ)
        if not self.reads.ailment and not self.writes.ailment:
            await self.probe(Way.WRITE)
        first()
        while True:
            await asyncio.sleep(0.02)
            for way in (Way.READ, Way.WRITE):
                breaker = self._breaker(way)
                if breaker.ailment and time.monotonic() >= breaker.probe_at:
                    await self.probe(way)

    async def probe(self, way: Way) -> None:
        """Probe one direction. Its time limit grows with the wait between probes."""
        within = max(PROBE_SECONDS, self._breaker(way).wait)
        fault = await _fault_of(self._client.probe(way), within)
        if fault is None and self.reads.ailment and way is Way.READ and not self.writes.ailment:
            # A store may answer lookups and return no objects: also write one and read it back.
            fault = await _fault_of(self._client.probe(Way.WRITE), within)
            if fault is not None:
                self._note_probe(Way.WRITE, fault)
        self._note_probe(way, fault)

    def _note_probe(self, way: Way, fault: Fault | None) -> None:
        breaker = self._breaker(way)
        before = breaker.ailment
        if fault is not None:
            breaker.failed(fault.reason, time.monotonic())
        else:
            breaker.probed()
        if breaker.ailment != before:
            self._report(way, breaker.ailment)


async def _fault_of(probe: Awaitable[Fault | None], within: float) -> Fault | None:
    try:
        return await asyncio.wait_for(probe, within)
    except asyncio.TimeoutError:
        return Fault(f"the store has not answered for {within:g} s")
    except Exception as error:  # an exception would end all probing
        return Fault(words_of(error))
