"""Whether a request may run before its load has landed: by policy, measured time and company."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.policies.load_or_compute import Overlapping, OverlapVerdict

STALL = 0.003


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("seconds", [None, 1e-5, 0.02])
def test_off_is_off_and_always_is_always(seconds: float | None, others: bool) -> None:
    off = Overlapping("off", stall=STALL).decide(seconds, others)
    assert off.verdict is OverlapVerdict.OFF
    assert not off.is_early
    always = Overlapping("always", stall=STALL).decide(seconds, others)
    assert always.verdict is OverlapVerdict.ALWAYS
    assert always.share == 0.0


@pytest.mark.parametrize(
    ("seconds", "others", "verdict", "share"),
    [
        (0.0005, False, OverlapVerdict.SHORT, None),
        (0.0005, True, OverlapVerdict.SHORT, None),
        (0.002, False, OverlapVerdict.ALONE, 0.0),
        (0.012, False, OverlapVerdict.ALONE, 0.75),
        (0.002, True, OverlapVerdict.WITHIN, 0.0),
        (0.003, True, OverlapVerdict.WITHIN, 0.0),
        (0.012, True, OverlapVerdict.ENDING, 0.75),
        (None, False, OverlapVerdict.ALONE, 1.0),
        (None, True, OverlapVerdict.UNMEASURED, 1.0),
    ],
)
def test_by_time_and_company(
    seconds: float | None, others: bool, verdict: OverlapVerdict, share: float | None
) -> None:
    found = Overlapping("auto", stall=STALL).decide(seconds, others)
    assert found.verdict is verdict
    assert found.share == (pytest.approx(share) if share is not None else None)


@given(st.floats(1e-3, 10.0), st.floats(1e-6, 1.0))
def test_others_are_never_held_up_longer_than_they_may_be(seconds: float, stall: float) -> None:
    found = Overlapping("auto", stall=stall).decide(seconds, True)
    assert found.share is not None
    assert (1.0 - found.share) * seconds <= stall * (1 + 1e-6)


@pytest.mark.parametrize("seconds", [None, 1e-5, 0.02])
def test_who_may_not_be_held_up_at_all_is_not(seconds: float | None) -> None:
    """The load is then not even cut into parts."""
    policy = Overlapping("auto", stall=0.0)
    found = policy.decide(seconds, True)
    assert found.verdict is OverlapVerdict.OTHERS
    assert not found.is_early
    alone = policy.decide(0.02, False)
    assert alone.is_alone
    assert alone.share == 1.0  # should others come meanwhile


def test_it_says_why() -> None:
    words = Overlapping("auto", stall=STALL).decide(0.012, True).words
    assert words == "ending: 12.0 ms to load, beside others once 75% have landed"
    assert Overlapping("off", stall=STALL).decide(0.012, True).words == "off"
