"""Hint parsing: a client's hints for a request, or the reason why they are not understood."""

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
"""Key under which a request's parameters have our hints."""

ACTION = "kvferry.hints@1.0"
"""Action whose payload has hints, in the form that a request's parameters have."""
FETCH = "kv.fetch@1.0"
"""Action that asks for prefetch from lower tiers; not handled, as kvferry prefetches anyway."""

_COMPLAINT_SECONDS = 60.0
_complain_at = float("-inf")


def tenant_of(salt: str) -> str:
    """Return a tenant name made from a cache salt; a digest, because the salt may be a secret."""
    return f"salt-{blake2b(salt.encode(errors='replace'), digest_size=4).hexdigest()}"


def read_hints(
    params: object,
    others: tuple[tuple[str, str], ...] = (),
    actions: Sequence[tuple[str, object]] = (),
) -> tuple[Hints, str]:
    """Return the hints in a request's parameters and actions, and why any are ignored.

    ``others`` pairs the engine's own parameters with hints of the same meaning. ``actions`` pairs
    an action, with its version, with its payload. The request's own hints take precedence over the
    actions', and the actions' over ``others``. Bad hints do not fail the request.
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
    except Exception as error:  # also a bug of ours, which would take kvferry out of service
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
