"""An answer's id finds the requests that vLLM made for it, and nobody else's."""

from __future__ import annotations

import pytest

from kvferry.errors import InputError
from kvferry.telemetry.source import (
    MOST_REQUESTS,
    answer_requests,
    matches_client_id,
    split_request_id,
)

OWN = "0f1e2d3c4b5a6978"
"""What vLLM calls a request whose client gave it no name."""


@pytest.mark.parametrize(
    ("request_id", "answer", "part"),
    [
        (f"cmpl-{OWN}-0-8b2677e5", f"cmpl-{OWN}", "-0"),
        (f"cmpl-{OWN}-12-87654321", f"cmpl-{OWN}", "-12"),
        (f"1_cmpl-{OWN}-0-8b2677e5", f"cmpl-{OWN}", "1_-0"),
        (f"cmpl-{OWN}-0", f"cmpl-{OWN}", "-0"),  # vLLM was told to add nothing at random
        (f"chatcmpl-{OWN}-8b2677e5", f"chatcmpl-{OWN}", ""),
        (f"3_chatcmpl-{OWN}-8b2677e5", f"chatcmpl-{OWN}", "3_"),
        (f"chatcmpl-{OWN}_1-8b2677e5", f"chatcmpl-{OWN}", "_1"),
        (f"chatcmpl-a-{OWN}-beam-2-8b2677e5", "chatcmpl-a", f"-{OWN}-beam-2"),
        (f"cmpl-a-{OWN}-beam-2-8b2677e5", "cmpl-a", f"-{OWN}-beam-2"),
        (f"resp_{OWN}_0-8b2677e5", f"resp_{OWN}", "_0"),
        (f"embd-{OWN}-0-8b2677e5", f"embd-{OWN}", "-0"),
        (f"generate-tokens-{OWN}-8b2677e5", f"generate-tokens-{OWN}", ""),
        ("0-8b2677e5", "0", ""),  # vLLM as a library counts
        ("conversation-004-turn-01", "conversation-004-turn-01", ""),  # another engine's
        # names that clients chose end as they like
        ("cmpl-agent-3-0-8b2677e5", "cmpl-agent-3", "-0"),
        ("cmpl-a-12345678-0-8b2677e5", "cmpl-a-12345678", "-0"),
        ("chatcmpl-agent-3-8b2677e5", "chatcmpl-agent-3", ""),
        ("chatcmpl-agent_3-8b2677e5", "chatcmpl-agent_3", ""),
        ("chatcmpl-a-deadbeef-8b2677e5", "chatcmpl-a-deadbeef", ""),
        ("resp_a_1_0-8b2677e5", "resp_a_1", "_0"),
        ("", "", ""),
        ("a\nb-0-8b2677e5", "a\nb-0-8b2677e5", ""),
    ],
)
def test_an_engines_name_says_whose_answer_it_is_of(request_id, answer, part):
    assert split_request_id(request_id) == (answer, part)


@pytest.mark.parametrize(
    ("name", "request_id", "is_found"),
    [
        ("cmpl-5f2c", "cmpl-5f2c-0-8b2677e5", True),
        ("chatcmpl-5f2c", "chatcmpl-5f2c-8b2677e5", True),
        ("cmpl-5f2c", "1_cmpl-5f2c-0-8b2677e5", True),
        ("my-own-id", "cmpl-my-own-id-0-8b2677e5", True),  # given by the client in a header
        ("my-own-id", "chatcmpl-my-own-id-8b2677e5", True),
        ("own", "cmpl-my-own-id-0-8b2677e5", False),
        ("xy", "x-cmpl-y-8b2677e5", False),
        ("x-y", "x-cmpl-y-8b2677e5", False),
        ("cmpl-5f2", "cmpl-5f2c-0-8b2677e5", False),
        ("mpl-5f2c", "cmpl-5f2c-0-8b2677e5", False),
        ("cmpl", "cmpl-5f2c-0-8b2677e5", False),
        ("0", "cmpl-5f2c-0-8b2677e5", False),
        ("8b2677e5", "cmpl-5f2c-0-8b2677e5", False),
        ("", "cmpl-5f2c-0-8b2677e5", False),
        ("", "", False),
    ],
)
def test_a_request_is_known_by_the_name_its_client_has(name, request_id, is_found):
    assert matches_client_id(name, request_id) is is_found


def test_an_answer_of_very_many_requests_is_not_for_one_order():
    ids = [f"{at}_cmpl-a-0-11111111" for at in range(MOST_REQUESTS + 1)]
    assert len(answer_requests("cmpl-a", ids[1:])) == MOST_REQUESTS
    with pytest.raises(InputError, match=r"257 requests.*256 at most"):
        answer_requests("cmpl-a", ids)
