"""Ctrl-C at any line of a ferry: its pool stays whole, or it says that it must be closed.

Seen to fail without ``_guarded``: after an interrupt in ``Pool.reserve``, ``Pool.end`` and some 40
other places the pool failed its integrity check or kept a lease for ever, or pins were miscounted.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.conftest import PROFILE

import kvferry
from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.errors import StateError
from kvferry.tiers.contract import Batch, BatchId, Way
from kvferry.tiers.memory import MemoryTier
from kvferry.types import TierName

SOURCE = os.path.dirname(kvferry.__file__)
TOKENS, FEW, SLOTS = 4, 3, 8
SAMPLED = 0 if PROFILE == "soak" else 60
"""Of all lines, so many are tried; 0: every one."""


def attached() -> kvferry.Ferry:
    kv = [np.zeros((2 * FEW, 2, TOKENS, 8), np.uint8)]
    settings: dict[str, Any] = {"load_policy": "always", "policy": "lru"}
    return kvferry.attach(
        kv, model="m", block_tokens=TOKENS, host=f"{SLOTS * kv[0][0].nbytes}B", **settings
    )


def keys_of(ferry: kvferry.Ferry, number: int) -> kvferry.Keys:
    return ferry.keys(range(1000 * number, 1000 * number + FEW * TOKENS))


def live(ferry: kvferry.Ferry, number: int) -> None:
    """Store, wait, match, load, wait; another hit is released. The pool is full from the third."""
    keys, blocks = keys_of(ferry, number), list(range(FEW))
    ferry.wait(ferry.store(keys, blocks), 5)
    ferry.release(ferry.match(keys))
    hit = ferry.match(keys)
    ferry.wait(ferry.load(hit, blocks[: len(hit)]), 5)
    ferry.poll()


def control(ferry: kvferry.Ferry, number: int) -> None:
    """The verbs that act on blocks by their keys, and a reset."""
    keys = keys_of(ferry, number - 1)  # which is there
    ferry.pin(keys, 60)
    ferry.hint(keys, {"continues": True})
    ferry.unpin(keys)
    ferry.hint(keys, {"ended": True})
    ferry.drop(keys)
    ferry.wait(ferry.store(keys, list(range(FEW))), 5)
    ferry.reset()


@contextmanager
def interrupting(at: int, opcodes: bool) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the line (or opcode) of this number, in code of kvferry."""
    count, event = [0], "opcode" if opcodes else "line"

    def step(frame: FrameType, what: str, _: object) -> Any:
        if what == event:
            count[0] += 1
            if count[0] == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return step

    def enter(frame: FrameType, what: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes = opcodes
        return step

    sys.settrace(enter)
    try:
        yield count
    finally:
        sys.settrace(None)


def lives_on(ferry: kvferry.Ferry) -> bool:
    """Whether the ferry serves as before; False if it says that it must be closed."""
    try:
        for number in range(10, 14):
            live(ferry, number)
    except StateError as error:
        assert "close it" in str(error)  # noqa: PT017
        return False
    scheduler = ferry._scheduler
    for _ in range(500):
        if scheduler.num_in_flight:
            ferry.poll(0.01)
    assert not scheduler.num_in_flight
    for request in scheduler.requests:  # the call that would have returned it, or ended it, did not
        request.end()
    scheduler.check_integrity()
    assert scheduler.pool.num_leases == 0
    return True


@pytest.mark.parametrize("act", [live, control])
@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "opcodes"])
def test_the_pool_is_whole_or_the_ferry_says_that_it_must_be_closed(
    opcodes: bool, act: Callable[[kvferry.Ferry, int], None]
) -> None:
    with attached() as ferry:
        for number in range(3):
            live(ferry, number)
        with interrupting(0, opcodes) as count:
            act(ferry, 3)
    places = range(1, count[0] + 1)
    if SAMPLED:
        places = sorted(random.Random(os.environ.get("SEED")).sample(places, SAMPLED))  # type: ignore[assignment]
    ends: dict[bool, int] = {True: 0, False: 0}
    for at in places:
        ferry = attached()
        try:
            for number in range(3):
                live(ferry, number)
            try:
                with interrupting(at, opcodes):
                    act(ferry, 3)
            except KeyboardInterrupt:
                pass
            ends[lives_on(ferry)] += 1
        except BaseException as error:
            error.add_note(f"interrupted at {at} of {count[0]}") if sys.version_info >= (
                3,
                11,
            ) else None
            raise
        finally:
            began = time.monotonic()
            ferry.close()
        assert time.monotonic() - began < 30
    assert ends[True]


def test_a_tier_that_was_interrupted_while_it_took_a_batch_closes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen to fail: close waited 10 s for a batch of which no thread had heard."""
    tier = MemoryTier(4, 64, name=TierName("memory"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    row = np.zeros(64, np.uint8)
    batch = Batch(
        BatchId(1),
        Way.WRITE,
        Keys(np.zeros((1, KEY_WORDS), "<u8")),
        1e12,
        np.array([[row.ctypes.data]]),
        np.array([64]),
        np.array([0]),
    )
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.submit(batch)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 2
