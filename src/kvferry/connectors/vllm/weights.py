"""Whether the model still has the weights that stored KV was computed with.

vLLM tells a connector nothing of weights that are replaced in a running server. So each rank looks
for itself: in a step that loads, it takes sums over a part of the weights, and if they are not what
they were, the loads fail, the requests compute, and the scheduler's side forgets everything::

    epoch 0                                        another epoch
    first step: sums    a load: the same sums      first step: sums
                        a load: others ──> stale ──> reset
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from kvferry.transfer.digests import PendingSums, Sums

log = logging.getLogger(__name__)

_MOST_KINDS = 8
"""Kinds of weights that are looked at: the projections of a layer, the embedding."""


class Weights:
    """A few of a model's weights. Owns none of them: an update may put others in their place."""

    def __init__(
        self,
        places: Sequence[tuple[Any, str]],
        device: Any,
        all_places: Sequence[tuple[Any, str]] = (),
    ) -> None:
        """``all_places`` are looked at once, for what outlives the server; ``places`` often."""
        self._places = places
        self._all_places = all_places
        self._sums = Sums(device)

    def mark(self) -> None:
        self._sums.mark()

    def sums_of_all(self) -> tuple[int, ...]:
        """Of every weight that stays where it is; waits for them."""
        self._sums.mark()
        return self._sums.begin([getattr(*place) for place in self._all_places]).result()

    def begin(self) -> PendingSums:
        return self._sums.begin([getattr(module, name) for module, name in self._places])


class Freshness:
    """Knows which epochs' blocks no longer fit the weights. Owns the comparisons, no transfer.

    Without weights to look at every epoch is fresh until it is reset. ``first`` are the sums that
    what outlives the server is named by, if anything does.
    """

    def __init__(
        self, weights: Weights | None = None, first: tuple[int, ...] | None = None
    ) -> None:
        self._weights = weights
        self._epoch: int | None = None
        self._entered: dict[int, int] = {}  # epochs in their order: their numbers say nothing
        self._known = first
        self.is_marked = False
        """Whether :meth:`look` has something to take."""
        self._pending: PendingSums | None = None
        self._stale: int | None = None
        self._untold: tuple[int, ...] = ()

    def enter(self, epoch: int) -> None:
        """Every step. What is stored from an epoch's first step on is of the weights of that step.

        So a reset that came with an update is no reason for another one.
        """
        if epoch != self._epoch:
            self._compare()
            if self._epoch is not None:  # the first epoch is of the weights that ``first`` is of
                self._known = None
            self._epoch = epoch
            self._entered.setdefault(epoch, len(self._entered))
            self.mark()

    def mark(self) -> None:
        """A step that loads: its blocks must fit the weights as they are now."""
        self._compare()
        if self._weights is not None:
            self._weights.mark()
            self.is_marked = True

    def look(self) -> None:
        """Take the sums that were marked: off the way of the step's own work."""
        if self.is_marked and self._weights is not None:
            self.is_marked = False
            try:
                self._pending = self._weights.begin()
            except Exception:
                self._give_up()

    @property
    def is_known(self) -> bool:
        """Whether the sums marked last are there: else :meth:`is_stale` waits for them."""
        self.look()
        return self._pending is None or self._pending.is_done

    def is_stale(self, epoch: int) -> bool:
        """Whether the weights have changed since blocks of this epoch were computed."""
        self._compare()
        number = self._entered.get(epoch)
        return self._stale is not None and (number is None or number <= self._stale)

    def take_stale(self) -> tuple[int, ...]:
        """Epochs found stale since the last call."""
        untold, self._untold = self._untold, ()
        return untold

    def _compare(self) -> None:
        self.look()
        if self._pending is None:
            return
        try:
            sums = self._pending.result()
        except Exception:
            self._give_up()
            return
        self._pending = None
        if self._known is not None and sums != self._known:
            self._note_stale()
        self._known = sums

    def _give_up(self) -> None:
        """Weights that cannot be looked at any more are not those we knew."""
        log.exception("kvferry cannot look at the model's weights; reset its cache after updates")
        self._weights = self._pending = None
        self._note_stale()

    def _note_stale(self) -> None:
        assert self._epoch is not None
        self._stale = self._entered[self._epoch]
        self._untold = (*self._untold, self._epoch)


def weights_of_caller(device: Any) -> Weights | None:
    """Weights on ``device`` of the model whose runner called us; None if they cannot be found."""
    try:
        get_model = next(_getters(sys._getframe(1)), None)
        found = _places(get_model(), device) if get_model is not None else []
        places = list(dict(found).values())[-_MOST_KINDS:]
        if places:
            return Weights(places, device, [place for _, place in found])
        log.warning("kvferry finds no weights to look at; reset its cache after updates")
    except Exception:
        log.exception("kvferry cannot look at the model's weights; reset its cache after updates")
    return None


def _getters(frame: FrameType | None) -> Iterator[Callable[[], Any]]:
    """Who among our callers has a model: vLLM's runner does, and does not tell connectors of it."""
    while frame is not None:
        getter = getattr(frame.f_locals.get("self"), "get_model", None)
        if callable(getter):
            yield getter
        frame = frame.f_back


def _places(model: Any, device: Any) -> list[tuple[str, tuple[Any, str]]]:
    """Weights that can be looked at, each with its kind: as modules and names, in their order.

    Of each kind the last is looked at often: training spares it least. Of the kinds, too, the last:
    encoders of images come before the language model, and stay as they are while that is trained.
    """
    found = [
        (re.sub(r"\d+", "#", f"{path}.{name}"), weight.data_ptr(), (module, name))
        for path, module in model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if _is_steady(path, weight) and weight.device == device
    ]
    # Where weights are kept in host memory, layers take turns in the same memory of the device.
    num_users = Counter((kind, memory) for kind, memory, _ in found)
    return [(kind, place) for kind, memory, place in found if num_users[kind, memory] == 1]


def _is_steady(path: str, weight: Any) -> bool:
    """Matrices only: a bias may be all zeros. No experts: they may move between ranks."""
    return weight.dim() == 2 and "experts" not in path
