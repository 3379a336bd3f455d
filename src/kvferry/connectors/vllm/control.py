"""Looks into vLLM's own process: block hashes of tokens, its engine loop, sleep, and the model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kvferry.connectors.common.weights import Weights
from kvferry.core.identity import Namespace, adopt
from kvferry.core.keys import Keys
from kvferry.errors import InputError

log = logging.getLogger(__name__)


def block_hasher(algorithm: str, hash_tokens: int) -> Callable[[list[int], str], list[bytes]]:
    """Return a function from a prompt's tokens and salt to vLLM's block hashes for it.

    Only for text without an adapter: only the request knows its images and its adapter.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(algorithm))
    one = SamplingParams(max_tokens=1)
    return lambda tokens, salt: list(
        Request(
            "kvferry-control", tokens, one, None, cache_salt=salt or None, block_hasher=hasher
        ).block_hashes
    )


class VllmTokens:
    """Maps a prompt's tokens and salt to its keys in vLLM; called on any thread."""

    def __init__(self, namespace: Namespace, algorithm: str) -> None:
        """``namespace`` has vLLM's number of tokens per hash block as its ``block_tokens``."""
        self._namespace = namespace
        self._algorithm = algorithm
        self._hashes: Callable[[list[int], str], list[bytes]] | None = None

    def __call__(self, tokens: list[int], salt: str) -> Keys:
        if not tokens:
            return Keys.empty()
        try:
            if self._hashes is None:
                self._hashes = block_hasher(self._algorithm, self._namespace.block_tokens)
            found = self._hashes(tokens, salt)
        except Exception as error:  # an unknown version of vLLM
            log.warning("kvferry cannot name blocks by their tokens", exc_info=True)
            raise InputError(
                f"this vLLM's blocks cannot be named by tokens ({type(error).__name__}: {error}); "
                "name the request"
            ) from error
        return adopt(self._namespace, found)


def find_waker() -> Callable[[], None]:
    """Return a function that wakes vLLM's engine loop when it sleeps for lack of requests.

    vLLM steps only while there is work, and checks for work only when a message comes in. So the
    function puts vLLM's own wake-up message into the loop's queue. Without such a loop (vLLM as a
    library) control requests wait for the next step. Call it on the engine's thread, in a hook.
    """
    for caller in _callers():
        if hasattr(caller, "input_queue") and hasattr(caller, "run_busy_loop"):
            try:
                from vllm.v1.engine import EngineCoreRequestType

                queue, message = caller.input_queue, (EngineCoreRequestType.WAKEUP, None)
            except (ImportError, AttributeError):  # a vLLM without such a message
                break
            return lambda: queue.put_nowait(message)
    return lambda: None


def before_forced_resets(pool: Any, let_go: Callable[[], None]) -> None:
    """Call ``let_go`` before vLLM resets its prefix cache with all running requests preempted.

    vLLM calls no connector then, and raises if a block is still held; so do its sleep and pause.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        if any(frame.f_locals.get("reset_running_requests") for frame in _frames()):
            let_go()
        return reset()

    pool.reset_prefix_cache = reset_prefix_cache


def has_peer(ours: type, hook: str) -> bool:
    """Whether another kind of connector, in the ``MultiConnector`` that calls us, has this hook."""
    unset = getattr(ours.__mro__[1], hook)
    return any(
        not isinstance(peer, ours) and getattr(type(peer), hook) is not unset
        for caller in _callers()
        for peer in getattr(caller, "_connectors", ())
    )


def falls_asleep() -> bool:
    """Whether vLLM resets its caches because it goes to sleep."""
    return any(
        frame.f_code.co_name == "sleep" and hasattr(frame.f_locals.get("self"), "model_executor")
        for frame in _frames()
    )


def weights_of_caller(device: Any) -> Weights | None:
    """Return the weights on ``device`` of the model whose runner called us; None if not found."""
    try:
        for caller in _callers():
            get_model = getattr(caller, "get_model", None)
            if callable(get_model):
                weights = Weights.of_model(get_model(), device)
                if weights is not None:
                    return weights
                break
        log.warning("kvferry finds no weights to look at; reset its cache after updates")
    except Exception:
        log.exception("kvferry cannot look at the model's weights; reset its cache after updates")
    return None


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods called us, nearest first: vLLM does not pass them to us."""
    return (frame.f_locals.get("self") for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
