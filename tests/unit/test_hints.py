"""Hints as they come with a request: what may be said, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.hints import MOST_RANGES, NAMES, Hints, TokenPriority


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, Hints()),
        ({"do_not_store": True}, Hints(max_store_tokens=0)),
        ({"do_not_store": False, "do_not_load": False}, Hints()),
        ({"do_not_load": True}, Hints(max_load_tokens=0)),
        (
            {"max_store_tokens": 64, "max_load_tokens": 0},
            Hints(max_store_tokens=64, max_load_tokens=0),
        ),
        ({"pin_seconds": "1h"}, Hints(pin_seconds=3600.0)),
        ({"ended": True}, Hints(ended=True)),
        ({"continues": True}, Hints(continues=True)),
        ({"continues": 30}, Hints(continues=True, within=30.0)),
        (
            {"continues": "500ms", "tenant": "search"},
            Hints(continues=True, within=0.5, tenant="search"),
        ),
        (
            {"priorities": [{"token_end": 512, "priority": 80, "duration_ms": 60000}]},
            Hints(priorities=(TokenPriority(token_end=512, priority=80, duration_ms=60000),)),
        ),
    ],
)
def test_what_was_said_is_what_is_meant(said, meant):
    assert Hints.read(said) == meant


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"do_not_stor": True}, "did you mean 'do_not_store'"),
        ({"do_not_store": 1}, "do_not_store must be true or false"),
        ({"max_load_tokens": -1}, "max_load_tokens: must be at least 0"),
        ({"pin_seconds": 0}, "pin_seconds: must be above zero"),
        ({"pin_seconds": "soon"}, "pin_seconds: expected a time"),
        ({"pin_seconds": float("nan")}, "pin_seconds: must be above zero"),
        ({"continues": -3}, "continues: must be above zero"),
        ({"ended": True, "continues": True}, "ended cannot have continues"),
        ({"ended": True, "pin_seconds": 3}, "ended cannot have pin_seconds"),
        ({"priorities": "high"}, "priorities: expected a list"),
        ({"priorities": [{"from": 3}]}, "each range has token_start"),
        ({"priorities": [{"token_start": 5, "token_end": 5}]}, "token_end 5 must be above"),
        ({"priorities": [{"priority": 101}]}, "priority: must be at most 100"),
        ({"priorities": [{"duration_ms": 0}]}, "duration_ms: must be at least 1"),
        ({"priorities": [{}] * (MOST_RANGES + 1)}, "at most 64 ranges"),
        ({"tenant": "x" * 65}, "tenant must be a name"),
        ({"tenant": "a\nb"}, "tenant must be a name"),
        ({"tenant": 7}, "tenant must be a name"),
        ([], "hints must be a mapping"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(said, words):
    with pytest.raises(InputError, match=words):
        Hints.read(said)


@pytest.mark.parametrize("given", ["ab", b"ab", 5, None, {"priority": 80}, ["ab"], [None], [[]]])
def test_priorities_that_are_no_ranges_are_refused_at_once(given):
    with pytest.raises(InputError, match=r"priorities: (expected a list|each range has)"):
        Hints(priorities=given)


def test_ranges_may_be_given_as_mappings_and_in_a_list():
    meant = TokenPriority(priority=80)
    for given_as in ([{"priority": 80}], ({"priority": 80},), [meant]):
        hints = Hints(priorities=given_as)  # type: ignore[arg-type]
        assert hints == Hints(priorities=(meant,))
        assert hash(hints) == hash(Hints(priorities=(meant,)))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), _JSON, max_size=4))
def test_whatever_comes_is_read_or_refused(said):
    words = ""
    try:
        hints = Hints.read(json.loads(json.dumps(said)))
    except InputError as error:
        words, hints = str(error), Hints()
    assert len(words) < 1000
    assert hints.max_store_tokens is None or hints.max_store_tokens >= 0
    assert hints.within is None or hints.continues
