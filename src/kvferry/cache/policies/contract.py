"""What an eviction policy is told and may ask; what it must answer.

A policy learns of three different things: blocks that came (``insert``), blocks that served a
request (``use``), and blocks that must stay only because others follow them (``keep``). It names
the next victims (``take``). Whether a block may go at all is for the pool to know. A policy that
``HearsRequests`` is also told of all requests, hit or missed; one that ``HearsHints``, of hints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys
from kvferry.types import SlotArray


class Arriving(NamedTuple):
    """Blocks that want slots: what room is needed for. To be looked at, not to be kept.

    ``keys`` are those of one call, in the order of their chain; ``slots`` says where each of them
    is, ``NO_SLOT`` for those that want one. ``parent`` is the slot of the block before the first of
    them, ``NO_SLOT`` where there is none here. Blocks that are not ``chained`` stand alone.
    Those that ``must_stay`` are to be pinned, and must not be refused for their value.
    """

    keys: Keys
    slots: SlotArray
    parent: int
    chained: bool
    must_stay: bool = False


class Evidence(NamedTuple):
    """A hint for a conversation: what its sender knows besides its blocks.

    It is ``ended``, or it ``continues`` (``within`` so many seconds from now, where that was said).
    ``sender`` names its tenant, else its session; empty where there is neither.
    """

    ended: bool = False
    continues: bool = False
    within: float | None = None
    sender: str = ""


@dataclass(frozen=True)
class Residents:
    """What a policy may see of the blocks in a pool: questions, answered when they are asked."""

    num_slots: int
    now: Callable[[], float]
    """Seconds, from some moment on; while a policy is told of a request, when that was."""
    keys_of: Callable[[SlotArray], Keys]
    parents_of: Callable[[SlotArray], SlotArray]
    """The slot of the block before each, ``NO_SLOT`` where there is none here."""
    num_followers_of: Callable[[SlotArray], npt.NDArray[np.int32]]
    """How many blocks come right after each. One that is followed cannot go without them."""
    is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]]
    """Whether each is cached, read by no lease, and no part of what arrives: else it cannot go."""
    can_go: Callable[[int], bool]
    """Whether one, by its slot, could go now: it is idle, and no block comes right after it."""
    feeds_below: Callable[[], bool] = lambda: False
    """Whether evicted blocks are copied to a lower tier: refused newcomers are lost to it, too."""


class EvictionPolicy(Protocol):
    """In which order cached blocks should go. Owns what it remembers; leaves claims to the pool.

    A policy holds a slot from ``insert`` until the slot is taken or discarded, and again from when
    it is kept, used or put back. Slots in a call are distinct. Every call takes a whole batch.
    """

    def insert(self, slots: SlotArray) -> None:
        """These blocks can be matched from now on; in the order of their chain."""

    def use(self, slots: SlotArray) -> None:
        """A request was served with these blocks, or stores what follows them; in chain order."""

    def keep(self, slots: SlotArray) -> None:
        """These, taken before, must stay as long as those that follow them; followers first.

        No sign of use: they were met before blocks that depend on them.
        """

    def put_back(self, slots: SlotArray) -> None:
        """These stay for now: they would go first again, in this order."""

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        """Let go of up to ``count`` slots and return them, the first to go first.

        The pool evicts those that may go, then keeps or puts back the others; one that is claimed
        comes back when its claim ends. It asks again while it lacks room, until the answer is
        empty: the rest of what arrives is not stored then. So a policy refuses newcomers.
        """

    def peek(self, count: int) -> SlotArray:
        """Up to ``count`` slots that would go first, in that order; changes nothing."""

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is held."""

    def discard(self, slots: SlotArray) -> None:
        """These slots left the cache; those that are not held are ignored."""

    def clear(self) -> None:
        """Let go of every slot."""


@runtime_checkable
class HearsHints(Protocol):
    """An eviction policy that takes hints as evidence. Others are helped by the pool."""

    def hint(self, keys: Keys, evidence: Evidence) -> None:
        """This was said of a request with these whole blocks, or of its leading ones that are here.

        Told when the request comes, before room is made for it, and again when it is over; of
        several times the last counts. A later request that goes on with it may prove it wrong.
        """


@runtime_checkable
class HearsRequests(Protocol):
    """An eviction policy that is told of every request, also of what was not here."""

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        """A request asks for these blocks: all whole ones of its ``num_tokens``, from the first on.

        ``slots`` are those of its hit: not of blocks that the engine has itself. Told once for
        each request, when it comes or some requests later, but before anything here changes or is
        chosen, so before its own blocks are stored.
        """


EvictionPolicyMaker = Callable[[Residents], EvictionPolicy]
"""What makes a policy for a pool: mostly its class."""
