"""Which requests of an engine an answer of its server is of, by the names that vLLM makes of it.

What a client knows as ``cmpl-5f2c`` is ``cmpl-5f2c-0-8b2677e5`` in the engine: the prompt's number
and eight random digits more. ::

    cmpl-5f2c-1-8b2677e5                            the second of several prompts
    1_cmpl-5f2c-0-8b2677e5                          the second of several samples
    chatcmpl-5f2c-8b2677e5                          a chat has one prompt, and no number
    chatcmpl-0f1e2d3c4b5a6978_1-8b2677e5            but for a batch of them
    resp_5f2c_1-8b2677e5                            the second turn of one response
    cmpl-5f2c-0f1e2d3c4b5a6978-beam-0-8b2677e5      a beam, of whatever answer
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.quantities import quoted
from kvferry.types import RequestId

MOST_REQUESTS = 256
"""Of one answer, for one order: the engine waits until it is carried out."""

_RANDOM = r"(?:-[0-9a-f]{8})?"  # vLLM can be told to leave it out
# A client may choose the middle of a name, so only what vLLM adds there in every case is taken off:
# "chatcmpl-agent_3" is a name of its own, no part of "chatcmpl-agent".
_FORMS = tuple(
    re.compile(rf"(?P<sample>(?:\d+_)?)(?P<answer>{answer})(?P<part>{part}){_RANDOM}")
    for answer, part in (
        (r".+?", r"-[0-9a-f]{16}-beam-\d+"),
        (r"(?:cmpl|embd|pooling|classify|score)-.+?", r"-\d+"),
        (r"chatcmpl-[0-9a-f]{16}", r"_\d+"),
        (r"resp_.+?", r"_\d+"),
        (r".+?", ""),
    )
)
_SERVERS = re.compile(r"^(?:chat)?cmpl-")


class RequestName(NamedTuple):
    """The id in vLLM's answer, and which of that answer's requests it is."""

    answer: str
    part: str


def read_name(request_id: RequestId) -> RequestName:
    """What an engine's name of a request says."""
    for form in _FORMS:
        if found := form.fullmatch(request_id):
            return RequestName(found["answer"], found["sample"] + found["part"])
    return RequestName(request_id, "")


def is_of_client(name: str, request_id: RequestId) -> bool:
    """Whether a client knows it so: by its answer's id, or by the X-Request-Id it sent itself."""
    if name not in request_id:  # far cheaper, and there are a thousand
        return False
    answer = read_name(request_id).answer
    return bool(name) and name in (answer, _SERVERS.sub("", answer))


def requests_of(answer: str, request_ids: Iterable[RequestId]) -> list[RequestId]:
    """Those of one answer, in their order. InputError where several answers had this id.

    A client that sends one X-Request-Id twice has two answers of one id: which is meant nobody
    knows, and the wrong one would be dropped.
    """
    found: dict[RequestId, str] = {}
    for request_id in request_ids:
        if answer in request_id and (name := read_name(request_id)).answer == answer:
            found[request_id] = name.part
    if len(set(found.values())) < len(found):
        raise InputError(f"several answers have the id {quoted(answer)}; {_one_of(found)}")
    if len(found) > MOST_REQUESTS:
        raise InputError(
            f"{quoted(answer)} has {len(found)} requests, and an order is for {MOST_REQUESTS} at "
            f"most; {_one_of(found)}"
        )
    return list(found)


def _one_of(found: Iterable[RequestId]) -> str:
    some = ", ".join(quoted(request_id) for request_id in list(found)[-3:])
    return f"name one by its engine's name, such as {some}"
