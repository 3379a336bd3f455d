"""What kvferry looks up in vLLM's own process: block hashes, a sleeping engine, the model."""

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
    """What gives the hashes that vLLM has for a prompt of these tokens, with this salt.

    Only for text, without an adapter: what else decides a block only its request knows.
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
    """From tokens to keys, as vLLM's own requests have them; called on any thread."""

    def __init__(self, namespace: Namespace, algorithm: str) -> None:
        """``namespace`` is for hash blocks of as many tokens as vLLM's have."""
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
        except Exception as error:  # another vLLM than those we know
            log.warning("kvferry cannot name blocks by their tokens", exc_info=True)
            raise InputError(
                f"this vLLM's blocks cannot be named by tokens ({type(error).__name__}: {error}); "
                "name the request"
            ) from error
        return adopt(self._namespace, found)


def find_waker() -> Callable[[], None]:
    """What wakes vLLM's engine loop where it sleeps for want of requests.

    vLLM steps only while there is work, and asks for that only when a message comes in: so the
    loop's own message for that is put into its queue. Without such a loop (vLLM as a library)
    orders wait for the next step. Call it on the engine's thread, while vLLM calls us.
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

    It asks no connector then, and raises if a block is still held: sleep and pause fail so, too.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        if any(frame.f_locals.get("reset_running_requests") for frame in _frames()):
            let_go()
        return reset()

    pool.reset_prefix_cache = reset_prefix_cache


def has_peer(ours: type, hook: str) -> bool:
    """Whether a connector of another kind, in the ``MultiConnector`` that calls us, has a hook."""
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
    """Weights on ``device`` of the model whose runner called us; None if they cannot be found."""
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
    """The objects whose methods called us, the nearest first: vLLM does not introduce them."""
    return (frame.f_locals.get("self") for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
