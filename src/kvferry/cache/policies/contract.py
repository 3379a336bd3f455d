"""The contract of eviction policies: what the pool tells them, and what they must answer.

The pool reports three different things: new blocks (``insert``), blocks that served a request
(``use``), and blocks that stay only because others follow them (``keep``). The policy names the
next victims (``take``); the pool decides whether each can be evicted. A policy that implements
``HearsRequests`` also gets all requests, hit or missed; with ``HearsHints`` it gets hints.
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
    """Blocks to be stored, for which a policy makes room. Valid during the call only.

    ``keys`` are those of one store, in chain order. ``slots`` has the slot of each, ``NO_SLOT`` for
    blocks that need one. ``parent`` is the slot of the block before the first, ``NO_SLOT`` if it is
    not in the pool. Blocks that are not ``chained`` do not depend on each other. Blocks that
    ``must_stay`` will be pinned: the policy must not refuse them for their value.
    """

    keys: Keys
    slots: SlotArray
    parent: int
    chained: bool
    must_stay: bool = False


class Evidence(NamedTuple):
    """A hint for a conversation, as the eviction policy gets it.

    It has ``ended``, or it ``continues``, ``within`` so many seconds from now if the hint says so.
    ``sender`` names its tenant, else its session; empty if it has neither.
    """

    ended: bool = False
    continues: bool = False
    within: float | None = None
    sender: str = ""


@dataclass(frozen=True)
class Residents:
    """What a policy may ask about the blocks in its pool; each call returns the current state."""

    num_slots: int
    now: Callable[[], float]
    """Time in seconds from an arbitrary start; while an event is delivered, the event's time."""
    keys_of: Callable[[SlotArray], Keys]
    parents_of: Callable[[SlotArray], SlotArray]
    """The slot of the block before each, ``NO_SLOT`` if that block is not in the pool."""
    num_followers_of: Callable[[SlotArray], npt.NDArray[np.int32]]
    """How many blocks follow each directly. A block cannot be evicted without its followers."""
    is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]]
    """Whether each is cached, under no lease or pin, and no part of the arriving chain."""
    can_go: Callable[[int], bool]
    """Whether the block in this slot could be evicted now: it is idle, and no block follows it."""
    feeds_below: Callable[[], bool] = lambda: False
    """Whether evicted blocks are copied to a lower tier, which never gets a refused newcomer."""


class EvictionPolicy(Protocol):
    """Orders cached blocks for eviction. Owns its queues and statistics; leaves claims to the pool.

    A policy holds a slot from ``insert`` until the slot is taken or discarded. ``keep``, ``use``
    and ``put_back`` return a taken slot to it. The slots of one call are distinct.
    """

    def insert(self, slots: SlotArray) -> None:
        """Add blocks that can be matched from now on, in chain order."""

    def use(self, slots: SlotArray) -> None:
        """Note that a request used these blocks or stores blocks after them; in chain order."""

    def keep(self, slots: SlotArray) -> None:
        """Return taken slots to the policy, followers first: they stay as long as their followers.

        This is no sign of use: the policy named them before blocks that depend on them.
        """

    def put_back(self, slots: SlotArray) -> None:
        """Return slots to the front of the eviction order, in the order given."""

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        """Release up to ``count`` slots and return them, in eviction order.

        The pool evicts those that can be evicted, then keeps or puts back the others; a claimed
        slot comes back when its claim ends. The pool asks again while it lacks room. With an empty
        answer the policy refuses the arriving blocks that still lack room: they are not stored.
        """

    def peek(self, count: int) -> SlotArray:
        """Return up to ``count`` slots that would be evicted next, in order; change nothing."""

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return, for each slot, whether the policy holds it."""

    def discard(self, slots: SlotArray) -> None:
        """Remove slots that left the cache; ignore those that the policy does not hold."""

    def clear(self) -> None:
        """Remove every slot."""


@runtime_checkable
class HearsHints(Protocol):
    """An eviction policy that takes hints. For other policies the pool pins or evicts instead."""

    def hint(self, keys: Keys, evidence: Evidence) -> None:
        """Take a hint for a request with these full blocks, or for its leading cached ones.

        Called when the request comes, before room is made for it, and again when it has ended; the
        last call counts. A later request that continues the chain may prove the hint wrong.
        """


@runtime_checkable
class HearsRequests(Protocol):
    """An eviction policy that gets every request, also those that miss."""

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        """Note that a request of ``num_tokens`` asked for these blocks, all its full ones.

        ``slots`` are those of its hit, without blocks that the engine has itself. Called once for
        each request, when it comes or some requests later. But the call comes before any later
        change to the pool and any choice of victims, so before the request's own blocks are stored.
        """


EvictionPolicyMaker = Callable[[Residents], EvictionPolicy]
"""Makes the policy of a pool; usually the policy's class."""
