"""What vLLM was promised and waits for.

A load whose blocks still come up goes to the ranks in pieces::

    allocated ─> first piece ─> ... ─> last piece        a load like any other, to vLLM
                          └──────────> closed: what was not ordered by then is computed

vLLM hears of a request once from every rank. So a rank that has copied a piece must know whether
more follow; and whatever ends a load early, a request's own end too, must be told to the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.scheduler import Ordered, Request
from kvferry.types import TransferId
from kvferry.vllm.messages import EarlyShares


class Promise(NamedTuple):
    """A load that vLLM waits for: whose it is, its transfers, the first group's blocks.

    Or a further piece of one. Without transfers nothing will bring it, and vLLM must be told. With
    ``early`` shares vLLM may be told of it before it has landed.
    """

    ferried: Request
    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]
    early: EarlyShares | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its loads are ordered, and were not taken back since."""
        return self.ferried.loading.issuperset(self.transfers)


class SortedOut(NamedTuple):
    """What the ranks are told of promises, by request: see ``StepOrders``."""

    loads: dict[str, tuple[TransferId, ...]]
    undone: dict[str, tuple[int, ...]]
    early: dict[str, EarlyShares]
    going_on: frozenset[str]


class Promises:
    """Owns what vLLM was promised and no rank was told of: loads, pieces, and the rest of loads."""

    def __init__(self) -> None:
        self._made: list[Promise] = []
        self._rest: dict[Request, dict[int, None]] = {}
        """Loads that the ranks believe to be open, and the blocks not ordered yet of each."""

    def __bool__(self) -> bool:
        return bool(self._made or self._rest)

    def make(
        self,
        ferried: Request,
        told: tuple[int, ...],
        ordered: Sequence[Ordered],
        early: EarlyShares | None,
    ) -> None:
        """vLLM counts on these blocks; this much of a load of them was ordered, or nothing."""
        transfers = tuple([part.transfer for part in ordered])
        self._made.append(Promise(ferried, transfers, told, early))
        if ferried.has_more_to_load:
            self._rest[ferried] = dict.fromkeys(told)
            self._note_ordered(ordered)

    def go_on(self, ordered: Sequence[Ordered]) -> None:
        """More pieces were ordered."""
        self._note_ordered(ordered)
        for part in ordered:
            blocks = tuple(part.blocks.tolist())
            self._made.append(Promise(part.request, (part.transfer,), blocks))

    def _note_ordered(self, ordered: Iterable[Ordered]) -> None:
        for part in ordered:
            for block in part.blocks.tolist():
                self._rest[part.request].pop(block, None)

    def take(self) -> SortedOut:
        """A step's orders go to the ranks.

        A load in pieces is closed with its last one; by the blocks that it lacks, where there is
        none.
        """
        loads: dict[str, tuple[TransferId, ...]] = {}
        undone: dict[str, tuple[int, ...]] = {}
        early: dict[str, EarlyShares] = {}
        going_on: set[str] = set()
        for promise in self._made:
            name = promise.ferried.id
            if not promise.transfers:
                undone[name] = promise.blocks
            elif promise.is_kept:
                loads[name] = loads.get(name, ()) + promise.transfers
                if promise.early is not None:
                    early[name] = promise.early
        self._made.clear()
        for ferried, rest in tuple(self._rest.items()):
            if ferried.has_more_to_load:
                going_on.add(ferried.id)
                continue
            del self._rest[ferried]
            if rest or ferried.id not in loads:
                going_on.add(ferried.id)  # until it is closed, in the same step
                undone[ferried.id] = tuple(rest)
        return SortedOut(loads, undone, early, frozenset(going_on))

    @property
    def unkept(self) -> dict[str, tuple[int, ...]]:
        """Loads vLLM waits for, and the blocks of each that no rank was told to fill."""
        unkept = {ferried.id: tuple(rest) for ferried, rest in self._rest.items()}
        for promise in self._made:
            name = promise.ferried.id
            unkept[name] = unkept.get(name, ()) + promise.blocks
        return unkept
