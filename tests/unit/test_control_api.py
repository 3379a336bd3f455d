"""Orders that name a request: all of one answer, none of another's."""

from __future__ import annotations

import json

import pytest
from tests.fakes.crafted_keys import keys as numbered
from tests.fakes.desk import Desk

from kvferry.core.keys import Keys
from kvferry.telemetry.endpoint import ControlApi
from kvferry.telemetry.source import Mailbox

FIRST, SECOND, CHAT = numbered([1, 2, 3]), numbered([1, 2, 4]), numbered([7, 8])


class AtOnce(Mailbox):
    """Carries orders out where they are given."""

    def command(self, work, patience=0.0):
        return work()


class Asked:
    """A door before a scheduler that has served two answers, one of them of two prompts."""

    def __init__(self) -> None:
        self.desk = Desk(slots=32)
        for name, keys in (
            ("cmpl-aaa-0-11111111", FIRST),
            ("cmpl-aaa-1-22222222", SECOND),
            ("chatcmpl-bbb-33333333", CHAT),
        ):
            self.desk.keep(name, keys, 4 * len(keys))
            self.desk.scheduler.control.remember(name, keys)
        self.door = ControlApi(
            self.desk.scheduler.control,
            AtOnce(),
            "x" * 16,
            keys_of_tokens=lambda tokens, salt: Keys.empty(),
        )

    def order(self, action: str, name: str, **more: object) -> tuple[int, dict]:
        body = json.dumps({"request_id": name, **more}).encode()
        reply = self.door.handle(("control", action), body)
        return int(reply.status), json.loads(reply.body)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_engines_own_name_is_one_request(asked):
    status, told = asked.order("lookup", "cmpl-aaa-1-22222222")
    assert (status, told["tokens"], told["host_tokens"]) == (200, 12, 12)
    assert told["request_ids"] == ["cmpl-aaa-1-22222222"]


def test_an_answers_id_is_all_of_its_requests(asked):
    names = ["cmpl-aaa-0-11111111", "cmpl-aaa-1-22222222"]
    told = asked.order("pin", "cmpl-aaa")[1]
    assert (told["request_ids"], told["blocks"]) == (names, 6)
    assert asked.desk.pool.counts.pinned == 4  # two of them are both's
    told = asked.order("unpin", "cmpl-aaa")[1]
    assert (told["blocks"], told["held_blocks"], asked.desk.pool.counts.pinned) == (4, 0, 0)
    assert asked.order("lookup", "chatcmpl-bbb")[1]["request_ids"] == ["chatcmpl-bbb-33333333"]


def test_a_drop_of_several_leaves_nothing_for_the_sake_of_one_another(asked):
    told = asked.order("drop", "cmpl-aaa")[1]
    assert (told["tokens"], told["host_tokens"], told["blocks"]) == (24, 0, 4)
    assert told["refused"] == []
    assert asked.order("lookup", "chatcmpl-bbb")[1]["host_tokens"] == 8


def test_of_two_answers_with_one_id_none_is_acted_on(asked):
    asked.desk.scheduler.control.remember("chatcmpl-bbb-44444444", SECOND)
    status, told = asked.order("drop", "chatcmpl-bbb")
    assert status == 400
    assert "several answers have the id 'chatcmpl-bbb'" in told["error"]
    assert asked.order("lookup", "chatcmpl-bbb-33333333")[1]["host_tokens"] == 8
