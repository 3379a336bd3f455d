"""Which steps of an engine are skipped, and how many in a row."""

from __future__ import annotations

import pytest

from kvferry.connectors.common.contract import Step
from kvferry.connectors.common.session import StepSkipper


def step(scheduled: dict[str, int], *, new: int = 0, preempted: int = 0) -> Step:
    return Step(scheduled, sum(scheduled.values()), ["new"] * new, ["gone"] * preempted)


DECODING = {"a": 1, "b": 1}


def quiet_steps(skipper: StepSkipper) -> int:
    count = 0
    while skipper.skips_quiet(step(DECODING)):
        count += 1
    return count


def test_the_first_step_is_looked_at():
    skipper = StepSkipper()
    assert not skipper.skips_quiet(step(DECODING))
    assert not skipper.num_calm


@pytest.mark.parametrize(("num_tokens", "count"), [(-3, 0), (0, 0), (5, 5), (32, 32), (9999, 32)])
def test_quiet_lasts_as_long_as_nobody_has_more_to_store(num_tokens, count):
    skipper = StepSkipper()
    skipper.looked(num_tokens)
    assert quiet_steps(skipper) == count


@pytest.mark.parametrize(
    "other",
    [step({}), step({"a": 2, "b": 1}), step(DECODING, new=1), step(DECODING, preempted=1)],
    ids=["nobody runs", "one prefills", "one is new", "one is preempted"],
)
def test_a_step_that_does_more_than_decode_is_not_quiet_and_costs_no_quiet(other):
    skipper = StepSkipper()
    skipper.looked(5)
    assert not skipper.skips_quiet(other)
    assert quiet_steps(skipper) == 5


def test_a_look_ends_the_quiet_and_the_calm():
    skipper = StepSkipper()
    skipper.looked(5)
    assert (skipper.num_quiet, skipper.num_calm) == (5, 4)
    skipper.look_next()
    assert (skipper.num_quiet, skipper.num_calm) == (0, 0)
