"""The endpoint of one process: metrics, explanations of requests, and the control API.

::

    GET /metrics                        for Prometheus
    GET /explain, /explain/REQUEST      why requests hit or missed, as JSON
    POST /control/pin                   with Authorization: Bearer TOKEN
    {"request_id": "cmpl-5f2c", "seconds": 3600}
    {"tokens": [1, 2, 3, ...], "salt": ""}  or  {"keys": ["9f...", ...]}
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from http import HTTPStatus
from typing import Any

from kvferry.core.keys import KEY_BYTES, Keys
from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import quoted, shown
from kvferry.errors import ConfigError, DeadlineError, InputError, StateError
from kvferry.hints import Hints, read_seconds
from kvferry.scheduler.control import Acted, Control
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.catalog import CONTENT_TYPE, exposition
from kvferry.telemetry.http import LOOPBACK, HttpServer, PostHandler, Reply
from kvferry.telemetry.source import Mailbox, Source, answer_requests
from kvferry.types import RequestId

_WELCOME = """kvferry
/metrics          for Prometheus
/explain          the latest requests
/explain/REQUEST  why a request hit or missed, and what was copied for it
"""


class Endpoint(Closing):
    """Serves a source's metrics and explanations, and the control API. Owns its HTTP server."""

    def __init__(
        self,
        source: Source,
        *,
        host: str = LOOPBACK,
        port: int = DEFAULT_PORT,
        last_port: int = 0,
        control: PostHandler | None = None,
    ) -> None:
        """Listen on ``port``, or on the next free port up to ``last_port``. 0 takes any free port.

        ``control`` handles control requests. Without it, the server refuses every POST.
        """
        self._source = source
        self._control = control
        self._server = HttpServer(
            self._answer, host=host, port=port, last_port=last_port, post_handler=control
        )

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    def _answer(self, path: tuple[str, ...]) -> Reply | None:
        match path:
            case ():
                return Reply(_WELCOME.encode())
            case ("metrics",):
                return Reply(exposition(self._source.snapshot()), CONTENT_TYPE)
            case ("explain",):
                source = self._source
                return Reply.json({"requests": source.recent(), "tiers_away": source.unavailable()})
            case ("explain", request_id):
                found = self._source.explain(request_id)
                if found is None:
                    words = f"nothing is remembered of request {request_id!r}"
                    return Reply.json({"error": words}, HTTPStatus.NOT_FOUND)
                return Reply.json(found)
            case _:
                return None

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if self._control is not None:
            self._control.close()
        self._server.close()


KeysOfTokens = Callable[[list[int], str], Keys]
"""Maps token ids and a salt to the keys of a request that has them."""

ACTIONS = ("lookup", "hint", "pin", "unpin", "prefetch", "drop")
_NAMED_BY = ("request_id", "tokens", "keys")
_EXTRA_FIELDS = {"hint": ("hints",), "pin": ("seconds",), "prefetch": ("seconds",)}
_RUN_TWICE = ("unpin", "drop")
"""Actions run twice on several chains: the first run spares blocks that a later chain shares."""
MAX_KEYS = 1 << 16
MAX_TOKENS = 1 << 20
_MAX_TOKEN = 2**63 - 1
_KEY = re.compile(f"[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")

NamedChains = tuple[list[Keys], list[RequestId] | None]
"""The chains that a control request names; and their request ids if it names a request."""


class ControlApi:
    """Parses control requests and runs them on the engine's thread, one at a time. Owns the token.

    The body of a request without the right token is never parsed.
    """

    def __init__(
        self,
        control: Control,
        mailbox: Mailbox,
        token: str,
        *,
        keys_of_tokens: KeysOfTokens,
    ) -> None:
        self._control = control
        self._mailbox = mailbox
        self._token = token.encode()
        self._keys_of_tokens = keys_of_tokens

    def refuse(self, path: tuple[str, ...], token: str | None) -> Reply | None:
        """Return an error reply if the token is wrong or the path unknown, else None."""
        if token is None:
            return _error(HTTPStatus.UNAUTHORIZED, "an order needs Authorization: Bearer TOKEN")
        given = token.encode(errors="replace")
        if not hmac.compare_digest(given, self._token):  # in constant time
            return _error(HTTPStatus.FORBIDDEN, "this is not the token (control_token)")
        if len(path) != 2 or path[0] != "control" or path[1] not in ACTIONS:
            return _error(HTTPStatus.NOT_FOUND, f"orders are {', '.join(ACTIONS)}, under /control/")
        return None

    def handle(self, path: tuple[str, ...], body: bytes) -> Reply:
        """Run a control request. Returns its result, or an error reply if nothing was done."""
        try:
            work = self._read(path[-1], body)
            done = self._mailbox.command(work)
        except (InputError, ConfigError) as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except LookupError as error:
            return _error(HTTPStatus.NOT_FOUND, str(error.args[0]))
        except (StateError, DeadlineError) as error:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; nothing was done")
        return Reply.json(done)

    def close(self) -> None:
        """Fail the control requests that wait for the engine."""
        self._mailbox.abandon("the engine closes")

    def _read(self, action: str, body: bytes) -> Callable[[], dict[str, object]]:
        """Parse and check a control request. Returns the work to do on the engine's thread."""
        given_fields = _object(body)
        allowed = (*_NAMED_BY, "salt", *_EXTRA_FIELDS.get(action, ()))
        unknown = [name for name in given_fields if name not in allowed]
        if unknown:
            raise InputError(f"{action} has no {quoted(unknown[0])}; it has {', '.join(allowed)}")
        find = self._finder(given_fields)
        act = self._action(action, given_fields)
        return lambda: _run_action(action, act, find())

    def _action(self, action: str, given_fields: Mapping[str, Any]) -> Callable[[Keys], Acted]:
        control = self._control
        if action == "hint":
            hints = Hints.read(given_fields.get("hints", {}))
            return lambda keys: control.hint(keys, hints)
        if action in ("pin", "prefetch"):
            given = given_fields.get("seconds")
            seconds = None if given is None else read_seconds("seconds", given)
            do = control.pin if action == "pin" else control.prefetch
            return lambda keys: do(keys, seconds)
        plain: Callable[[Keys], Acted] = getattr(control, action)
        return plain

    def _finder(self, given_fields: Mapping[str, Any]) -> Callable[[], NamedChains]:
        """Return a function that finds the keys on the engine's thread. Tokens are hashed here."""
        named = [name for name in _NAMED_BY if name in given_fields]
        if len(named) != 1:
            raise InputError(f"say which blocks, by one of {', '.join(_NAMED_BY)}")
        if "salt" in given_fields and named != ["tokens"]:
            raise InputError("a salt goes with tokens: keys and requests have theirs already")
        if named == ["request_id"]:
            name = given_fields["request_id"]
            if not isinstance(name, str) or not name:
                raise InputError(f"request_id must be a request's name, got {shown(name)}")
            return lambda: self._of_request(name)
        if named == ["tokens"]:
            salt = given_fields.get("salt", "")
            if not isinstance(salt, str):
                raise InputError(f"salt must be text, got {shown(salt)}")
            keys = self._keys_of_tokens(_tokens(given_fields["tokens"]), salt)
        else:
            keys = _keys(given_fields["keys"])
        return lambda: ([keys], None)

    def _of_request(self, name: str) -> NamedChains:
        """Find the request with this engine id, else all requests of the answer with this id.

        Similar ids must not match: the action would hit another client's request.
        """
        control = self._control
        keys = control.keys_of(name)
        if keys is not None:
            return [keys], [name]
        found = {
            each: control.keys_of(each) for each in answer_requests(name, control.request_ids())
        }
        known = {each: keys for each, keys in found.items() if keys is not None}
        if not known:
            raise LookupError(f"request {quoted(name)} is not remembered; name its tokens or keys")
        return list(known.values()), list(known)


def _run_action(action: str, act: Callable[[Keys], Acted], found: NamedChains) -> dict[str, object]:
    """Run an action on every chain. Returns the results, added up."""
    chains, request_ids = found
    told = _add_up([act(keys) for keys in chains])
    if action in _RUN_TWICE and len(chains) > 1:
        again = _add_up([act(keys) for keys in chains])
        told = replace(again, blocks=told.blocks + again.blocks)
    return asdict(told) | ({} if request_ids is None else {"request_ids": request_ids})


def _add_up(done: Sequence[Acted]) -> Acted:
    """Add up the results of several chains. A block that chains share counts once per chain."""
    if len(done) == 1:
        return done[0]
    refused = tuple(dict.fromkeys(words for each in done for words in each.refused))
    is_under_way = any(each.is_under_way for each in done)
    totals = {
        each.name: sum(getattr(one, each.name) for one in done)
        for each in fields(Acted)
        if each.name not in ("refused", "is_under_way")
    }
    return Acted(**totals, refused=refused, is_under_way=is_under_way)


def _error(status: HTTPStatus, words: str) -> Reply:
    return Reply.json({"error": words}, status)


def _object(body: bytes) -> dict[str, Any]:
    try:
        given_fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"an order is a JSON object: {quoted(str(error))}") from None
    if not isinstance(given_fields, dict):
        raise InputError(f"an order is a JSON object, got {shown(given_fields)}")
    return given_fields


def _tokens(value: object) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise InputError(f"tokens must be a list of at most {MAX_TOKENS} token ids")
    if not {int}.issuperset(map(type, value)) or not all(0 <= t <= _MAX_TOKEN for t in value):
        raise InputError("tokens must be whole numbers, none negative")
    return value


def _keys(value: object) -> Keys:
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise InputError(f"keys must be a list of at most {MAX_KEYS} keys in hexadecimal")
    for number, key in enumerate(value):
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InputError(
                f"keys must be hexadecimal, {2 * KEY_BYTES} digits each; number {number} is "
                f"{shown(key)}"
            )
    return Keys.from_bytes([bytes.fromhex(key) for key in value])
