"""Hint parsing: what a client said of a request, with a reason where it was not understood."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b

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

_COMPLAINT_SECONDS = 60.0
_complain_at = float("-inf")


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
    more. A request with bad hints is served all the same.
    """
    hints, reason = Hints(), ""
    try:
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params must be a mapping, got {type(params).__name__}")
        said = [each for kind, each in actions if kind == ACTION and isinstance(each, Mapping)]
        named = {ours: params[theirs] for theirs, ours in others if theirs in params}
        given = params.get(OURS, {})
        if not isinstance(given, Mapping):
            raise InputError(f"{OURS} must be a mapping of hints, got {type(given).__name__}")
        for each in (*reversed(said), given):
            named |= each
        hints = Hints.read(named)
    except Exception as error:  # a mistake of ours, too: it would take kvferry out of service
        why = str(error) if isinstance(error, InputError) else type(error).__name__
        reason = f"the hints of this request are not heeded: {why}"
    if unknown := [kind for kind, _ in actions if kind not in (ACTION, FETCH)]:
        words = f"unknown actions are ignored: {quoted(', '.join(unknown))}"
        reason = "; ".join(filter(None, [reason, words]))
    global _complain_at
    if reason and time.monotonic() >= _complain_at:
        _complain_at = time.monotonic() + _COMPLAINT_SECONDS
        log.warning("kv_transfer_params: %s (logged once a minute)", reason)
    return hints, reason
