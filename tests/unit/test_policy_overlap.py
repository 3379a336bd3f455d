"""Whether a request may run before its load has landed: by policy, measured time and company."""

from __future__ import annotations

import pytest

from kvferry.cache.policies.load_or_compute import Overlapping, OverlapVerdict


@pytest.mark.parametrize(
    ("policy", "seconds", "has_others", "verdict", "words"),
    [
        ("off", 0.02, False, OverlapVerdict.OFF, "off"),
        ("auto", 0.02, True, OverlapVerdict.OTHERS, "others"),
        ("auto", None, True, OverlapVerdict.OTHERS, "others"),
        ("auto", 0.0005, False, OverlapVerdict.SHORT, "short"),
        ("auto", 0.012, False, OverlapVerdict.ALONE, "alone: 12.0 ms to load"),
        ("auto", None, False, OverlapVerdict.ALONE, "alone"),
    ],
)
def test_by_policy_time_and_company(policy, seconds, has_others, verdict, words):
    found = Overlapping(policy).decide(seconds, has_others=has_others)
    assert found.verdict is verdict
    assert found.is_early == (verdict is OverlapVerdict.ALONE)
    assert found.words == words
