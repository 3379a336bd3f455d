"""Hint parsing: what a client said of a request, with a reason where it was not understood."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from kvferry.connectors.common.guard import OnceLogger
from kvferry.core.quantities import quoted
from kvferry.errors import InputError
from kvferry.hints import Hints

log = logging.getLogger(__name__)

OURS = "kvferry"
"""The key of the hints among a request's parameters."""

ACTION = "kvferry.hints@1.0"
"""The action whose payload has hints, as a request's parameters have them."""
FETCH = "kv.fetch@1.0"
"""Asks for blocks to come up from lower tiers before the request's turn: that is done anyway."""

_MAX_BYTES = 4096
_VERSION = 2
"""Of what ``marshal`` writes: the last without references, which would tell equal data apart."""

_complaint = OnceLogger(seconds=60.0)


def tenant_of(salt: str) -> str:
    """The tenant that sends this salt, by a name that does not reveal it: it may be a secret."""
    return f"salt-{blake2b(salt.encode(errors='replace'), digest_size=4).hexdigest()}"


def read_hints(
    params: object,
    others: tuple[tuple[str, str], ...] = (),
    actions: Sequence[tuple[str, object]] = (),
) -> tuple[Hints, str]:
    """The hints among a request's parameters and an orchestrator's actions; why some are ignored.

    ``others`` are the engine's own parameters that mean the same, each with the hint's name;
    ``actions`` are kinds with versions, and what each says. What the request says itself counts
    more. A request with bad hints is served all the same. Many requests say the same, and to read
    it takes longer than to look a request up, so answers are kept.
    """
    unknown = [kind for kind, _ in actions if kind not in (ACTION, FETCH)]
    for kind, said in actions:
        if kind == ACTION and isinstance(said, Mapping) and isinstance(params, Mapping):
            given = params.get(OURS, {})
            params = {**params, OURS: {**said, **given} if isinstance(given, Mapping) else given}
    hints, reason = _read_params(params, others)
    if unknown:
        words = f"unknown actions are ignored: {quoted(', '.join(unknown))}"
        reason = "; ".join(filter(None, [reason, words]))
    if reason and _complaint.is_due():
        log.warning("kv_transfer_params: %s (logged once a minute)", reason)
    return hints, reason


def _read_params(params: object, others: tuple[tuple[str, str], ...]) -> tuple[Hints, str]:
    try:
        written = marshal.dumps(params, _VERSION)  # type: ignore[arg-type]
    except ValueError:  # not plain data, or nested too deep
        written = b""
    if 0 < len(written) <= _MAX_BYTES:
        return _known(written, others)
    return _read(params, others)


@lru_cache(maxsize=64)
def _known(written: bytes, others: tuple[tuple[str, str], ...]) -> tuple[Hints, str]:
    return _read(marshal.loads(written), others)


def _read(params: object, others: tuple[tuple[str, str], ...]) -> tuple[Hints, str]:
    try:
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params must be a mapping, got {type(params).__name__}")
        given = params.get(OURS, {})
        if not isinstance(given, Mapping):
            raise InputError(f"{OURS} must be a mapping of hints, got {type(given).__name__}")
        named = {ours: params[theirs] for theirs, ours in others if theirs in params}
        return Hints.read({**named, **given}), ""
    except Exception as error:  # a mistake of ours, too: it would take kvferry out of service
        reason = str(error) if isinstance(error, InputError) else type(error).__name__
        return Hints(), f"the hints of this request are not heeded: {reason}"
