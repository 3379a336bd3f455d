"""Random lives of a drive's queue: every order is answered once, in time.

The threads are played by the test, one step at a time, and so is the clock.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Batch, BatchId, Result, Way
from kvferry.tiers.disk import io_queue as module
from kvferry.tiers.disk.io_queue import IoQueue, Job

DEADLINE = 10.0
WAYS = [Way.READ, Way.WRITE]


class IoQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.clock = mock.patch.object(module, "time", clock)
        self.clock.start()
        self.queue = IoQueue(self.answer, blocks_per_job=3, deadline=DEADLINE)
        self.sent: dict[int, Batch] = {}
        self.answers: dict[int, Result] = {}
        self.jobs: list[Job] = []
        self.good: dict[int, set[int]] = {}
        self.ailment = ""
        self.refusal = ""

    def teardown(self) -> None:
        self.clock.stop()

    def answer(self, result: Result) -> None:
        assert result.batch_id not in self.answers, "answered twice"
        assert all(job.order.message.id != result.batch_id for job in self.jobs)
        order = self.sent[result.batch_id]
        good = {at for at in range(len(order)) if result.ok[at]}
        assert good <= self.good[result.batch_id], "said to have moved, and has not"
        assert set(result.reasons) == set(range(len(order))) - good
        assert result.num_bytes == 8 * len(good)
        self.answers[result.batch_id] = result

    @rule(
        way=st.sampled_from(WAYS),
        places=st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True),
        within=st.sampled_from([-1.0, 0.5, 5.0, 100.0]),
    )
    def submit(self, way: Way, places: list[int], within: float) -> None:
        number = len(self.sent)
        order = Batch(
            BatchId(number),
            way,
            Keys(np.zeros((len(places), 4), np.uint64)),
            self.now + within,
            np.zeros((len(places), 1), np.int64),
            np.array([8]),
            np.array(places),
        )
        self.sent[number] = order
        self.good[number] = set()
        self.queue.submit(order, 0)
        refused = self.ailment or (self.refusal if way is Way.WRITE else "")
        if within < 0 or refused:
            assert not self.answers[number].ok.any(), "it must fail at once"

    @rule(way=st.sampled_from(WAYS))
    def take(self, way: Way) -> None:
        if not self.queue._may_take(way):
            return
        if way is Way.WRITE and self.queue._waiting[Way.READ]:
            assert not self.queue._in_flight[Way.WRITE], "reads go before writes"
        with mock.patch.object(self.queue._work[way], "wait_for", self.wait_or_stop):
            try:
                job = self.queue.take(way)
            except StopIteration:
                return  # all that waited had been given up
        assert job is not None
        order = job.order.message
        assert self.now < order.deadline
        assert not self.ailment
        places = job.order.places[job.positions]
        assert 1 <= len(places) <= 3
        assert (np.diff(places) > 0).all()
        self.jobs.append(job)

    def wait_or_stop(self, is_so: object) -> bool:
        assert callable(is_so)
        if not is_so():
            raise StopIteration
        return True

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(job)
        positions = job.positions.tolist()
        bad = data.draw(st.sets(st.sampled_from(positions)))
        self.good[job.order.message.id] |= set(positions) - bad
        self.queue.end(job, dict.fromkeys(bad, "broken"))

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        hung = self.queue.sweep()
        late = [job for job in self.jobs if self.now - job.began > DEADLINE]
        assert bool(hung) == bool(late)
        for number, order in self.sent.items():
            begun = any(job.order.message.id == number for job in self.jobs)
            if self.now >= order.deadline and not begun:
                assert number in self.answers, "it did not begin in time, and waits"

    @rule()
    def shut(self) -> None:
        self.ailment = "cable pulled"
        self.queue.shut(self.ailment)

    @rule(reason=st.sampled_from(["", "full"]))
    def refuse_writes(self, reason: str) -> None:
        self.refusal = reason
        self.queue.refuse_writes(reason)

    @invariant()
    def who_waits_can_still_be_served(self) -> None:
        waiting = {job.order.message.id for jobs in self.queue._waiting.values() for job in jobs}
        busy = {job.order.message.id for job in self.jobs}
        unanswered = self.sent.keys() - self.answers.keys()
        assert unanswered <= waiting | busy, "an order that nobody has is never answered"
        if self.ailment:
            assert not waiting & unanswered


TestIoQueue = IoQueueMachine.TestCase
