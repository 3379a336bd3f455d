"""What a client of vLLM said of a request, in our words: hints in ``kv_transfer_params``."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler import Request, Scheduler
from kvferry.vllm.chain import Naming, RequestKeys
from kvferry.vllm.quiet import Seldom

log = logging.getLogger("vllm.kvferry")

OURS = "kvferry"
"""The key of our hints in ``kv_transfer_params``; vLLM's own offloading reads two beside it."""

_VLLMS = {"max_offload_tokens": "max_store_tokens", "max_load_tokens": "max_load_tokens"}

_MOST_BYTES = 4096
_VERSION = 2
"""Of what ``marshal`` writes: the last without references, which would tell equal data apart."""

_complaint = Seldom(seconds=60.0)


def opened(scheduler: Scheduler, request: Any, naming: Naming) -> Request:
    """Open a request of vLLM's, as the parameters that came with it say."""
    chain = RequestKeys(request, naming)
    params = getattr(request, "kv_transfer_params", None)
    if params is None and not scheduler.has_tenants:
        return scheduler.open(request.request_id, chain)
    hints, words = hints_of(params if params is not None else {})
    salt = getattr(request, "cache_salt", None)
    if scheduler.has_tenants and salt and not hints.tenant:
        hints = replace(hints, tenant=tenant_of(salt))
    return scheduler.open(request.request_id, chain, hints, unheeded=words)


def tenant_of(salt: str) -> str:
    """Who sends this salt, by a name that does not give it away: a salt may be a secret."""
    return f"salt-{blake2b(salt.encode(errors='replace'), digest_size=4).hexdigest()}"


def hints_of(params: Any) -> tuple[Hints, str]:
    """The hints among a request's parameters, and why some were not understood.

    A request is served all the same: who sent it may be one of many, and the server is everybody's.
    Many requests say the same, and to read it takes longer than to look a request up.
    """
    try:
        written = marshal.dumps(params, _VERSION)
    except ValueError:  # not plain data, or nested too deep
        written = b""
    hints, words = _known(written) if 0 < len(written) <= _MOST_BYTES else _read(params)
    if words and _complaint.is_due():
        log.warning("kv_transfer_params: %s (said once a minute)", words)
    return hints, words


@lru_cache(maxsize=64)
def _known(written: bytes) -> tuple[Hints, str]:
    return _read(marshal.loads(written))


def _read(params: object) -> tuple[Hints, str]:
    try:
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params must be a mapping, got {type(params).__name__}")
        given = params.get(OURS, {})
        if not isinstance(given, Mapping):
            raise InputError(f"{OURS} must be a mapping of hints, got {type(given).__name__}")
        said = {ours: params[name] for name, ours in _VLLMS.items() if name in params}
        return Hints.read({**said, **given}), ""
    except Exception as error:  # a mistake of ours, too: it would take us out of service
        why = str(error) if isinstance(error, InputError) else type(error).__name__
        return Hints(), f"the hints of this request are not heeded: {why}"
