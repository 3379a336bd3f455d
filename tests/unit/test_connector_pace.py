"""When a step of vLLM's goes by without a look, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.vllm.serving import Pace


def step(scheduled: dict[str, int], *, new: int = 0, preempted: int = 0) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[object()] * new,
        preempted_req_ids={str(number) for number in range(preempted)} or None,
    )


DECODING = {"a": 1, "b": 1}


def quiet_steps(pace: Pace) -> int:
    count = 0
    while pace.skips_quiet(step(DECODING)):
        count += 1
    return count


def test_the_first_step_is_looked_at():
    pace = Pace()
    assert not pace.is_quiet
    assert not pace.skips_quiet(step(DECODING))
    assert not pace.may_be_calm(step(DECODING, new=1))


@pytest.mark.parametrize(("num_tokens", "count"), [(-3, 0), (0, 0), (5, 5), (32, 32), (9999, 32)])
def test_quiet_lasts_as_long_as_nobody_has_more_to_store(num_tokens, count):
    pace = Pace()
    pace.looked(num_tokens)
    assert pace.is_quiet == (count > 0)
    assert quiet_steps(pace) == count


@pytest.mark.parametrize(
    "other",
    [step({}), step({"a": 2, "b": 1}), step(DECODING, new=1), step(DECODING, preempted=1)],
    ids=["nobody runs", "one prefills", "one is new", "one is preempted"],
)
def test_a_step_that_does_more_than_decode_is_not_quiet_and_costs_no_quiet(other):
    pace = Pace()
    pace.looked(5)
    assert not pace.skips_quiet(other)
    assert quiet_steps(pace) == 5


def test_what_happens_ends_the_quiet_and_leaves_the_calm():
    pace = Pace()
    pace.looked(5)
    pace.disturb()
    assert not pace.is_quiet
    assert pace.may_be_calm(step(DECODING, new=1))
    pace.look_next()
    assert not pace.may_be_calm(step(DECODING, new=1))


def test_calm_is_for_steps_that_bring_requests_and_take_none_off():
    pace = Pace()
    pace.looked(0)
    assert not pace.may_be_calm(step(DECODING))
    assert not pace.may_be_calm(step(DECODING, new=1, preempted=1))
    for _ in range(4):
        assert pace.may_be_calm(step(DECODING, new=1))
        pace.skip_calm()
    assert not pace.may_be_calm(step(DECODING, new=1))
