"""Control from outside in vLLM: tokens named as vLLM names blocks, and an idle engine woken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from kvferry.connectors.vllm.messages import RankShape
from kvferry.core.identity import Namespace, adopt
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.tiers.disk.marking import here_apart, mark_apart

log = logging.getLogger("vllm.kvferry")


def block_hasher(algorithm: str, hash_tokens: int) -> Callable[[list[int], str], list[bytes]]:
    """What gives the hashes that vLLM has for a prompt of these tokens, with this salt.

    Only for text, without an adapter: what else decides a block only its request knows.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(algorithm))

    def hashes(tokens: list[int], salt: str) -> list[bytes]:
        request = Request(
            "kvferry-control",
            tokens,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt or None,
            block_hasher=hasher,
        )
        return list(request.block_hashes)

    return hashes


class VllmTokens:
    """From tokens to keys, as vLLM's own requests have them. Owns nothing of vLLM's.

    Its hashes are made when they are first wanted, on whatever thread wants them.
    """

    def __init__(self, namespace: Namespace, algorithm: str, hash_tokens: int) -> None:
        self._namespace = namespace
        self._algorithm = algorithm
        self._hash_tokens = hash_tokens
        self._hashes: Callable[[list[int], str], list[bytes]] | None = None

    def __call__(self, tokens: list[int], salt: str) -> Keys:
        if not tokens:
            return Keys.empty()
        try:
            if self._hashes is None:
                self._hashes = block_hasher(self._algorithm, self._hash_tokens)
            found = self._hashes(tokens, salt)
        except Exception as error:  # another vLLM than those we know
            log.warning("kvferry cannot name blocks by their tokens", exc_info=True)
            raise InputError(
                f"this vLLM's blocks cannot be named by tokens ({type(error).__name__}: {error}); "
                "name the request"
            ) from error
        return adopt(self._namespace, found)


class EngineBell:
    """Wakes vLLM's engine loop where it sleeps for want of requests. Owns nothing of vLLM's.

    vLLM steps only while there is work, and asks for that only when a message comes in. So the
    loop's own message for that is put into its queue. Where there is no such loop (vLLM as a
    library) nothing is woken: orders wait for the next step.
    """

    def __init__(self) -> None:
        self._queue: Any = None
        self._message: Any = None

    def find(self) -> None:
        """On the engine's thread, while it makes us: who called us has the queue."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            loop: Any = frame.f_locals.get("self")
            if hasattr(loop, "input_queue") and hasattr(loop, "run_busy_loop"):
                self._queue = loop.input_queue
                self._message = _wake_message()
                return
            frame = frame.f_back

    def __call__(self) -> None:
        if self._queue is not None and self._message is not None:
            self._queue.put_nowait(self._message)


def _wake_message() -> Any:
    try:
        from vllm.v1.engine import EngineCoreRequestType

        return (EngineCoreRequestType.WAKEUP, None)
    except (ImportError, AttributeError):  # a vLLM without such a message
        return None


# ------------------------------------------------------------------------------------------------
# A reset that holds whatever happens next: the scheduler's side marks the ranks' stores itself.
#
# The ranks hear of a reset with the next step, and a server may be killed before there is one.
# Stores
# on this host are marked at once: whoever opens them next forgets first. Of ranks on other hosts
# the
# stores are out of reach; but a block counts only if every rank has it, so one rank that has
# forgotten is enough.


_START_SECONDS = 10.0
"""Beside what a drive may take: the mark is written by a process that has to start first."""


class DiskMarks:
    """Knows the stores of all ranks, and which of them can be reached from here.

    Asked while the ranks have just opened them: a store that vanishes later is no reason to believe
    that it never was here.
    """

    def __init__(self, shapes: Iterable[RankShape], drive_seconds: float) -> None:
        stores = [store for shape in shapes for tier in shape.tiers for store in tier.stores]
        self._timeout = drive_seconds + _START_SECONDS
        self._here = here_apart(stores, self._timeout) if stores else []
        self._is_apart = bool(stores) and not self._here

    def write(self) -> str:
        """Mark them; why what is on disk may still be found after a crash, or nothing."""
        if self._is_apart:
            log.warning("no rank's disk can be reached from here: it forgets with the next step")
        return mark_apart(self._here, self._timeout) if self._here else ""
