"""Detects that the model's weights have changed since stored KV was computed.

Engines do not tell a connector when weights are replaced in a running server. So each rank takes
digests of a part of the weights in every step that loads. If they differ from the last ones, the
loads fail, the requests compute, and the scheduler side forgets every block::

    epoch 0                                        another epoch
    first step: digests    a load: the same        first step: digests
                           a load: others ──> stale ──> reset
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvferry.transfer.digests import PendingDigests, WeightDigests

log = logging.getLogger(__name__)

_MAX_KINDS = 8
"""The most kinds of weights in a digest, such as a layer's projections and the embedding."""

_T = TypeVar("_T")


class Weights:
    """Weights of a model, by module and name, because an update may replace their tensors."""

    def __init__(
        self,
        places: Sequence[tuple[Any, str]],
        device: Any,
        all_places: Sequence[tuple[Any, str]] = (),
    ) -> None:
        """``places`` are in every digest; ``all_places`` in that for tiers that outlive us."""
        self._places = places
        self._all_places = all_places
        self._sums = WeightDigests(device)

    @classmethod
    def of_model(cls, model: Any, device: Any) -> Weights | None:
        """Return a torch module's weights on ``device``; None if it has none that can be checked.

        Each digest covers the last weight of each kind: training is least likely to spare it. Of
        the kinds it covers the last: image encoders come first, and keep their weights while the
        language model is trained.
        """
        all_of = [
            (re.sub(r"\d+", "#", f"{path}.{name}"), weight.data_ptr(), (module, name))
            for path, module in model.named_modules()
            for name, weight in module.named_parameters(recurse=False)
            # Matrices only: a bias may be all zeros. No experts: they may move between ranks.
            if weight.dim() == 2 and "experts" not in path and weight.device == device
        ]
        # With weights offloaded to host memory, layers take turns in the same device memory.
        num_users = Counter((kind, memory) for kind, memory, _ in all_of)
        found = [(kind, place) for kind, memory, place in all_of if num_users[kind, memory] == 1]
        places = list(dict(found).values())[-_MAX_KINDS:]
        return cls(places, device, [place for _, place in found]) if places else None

    def mark(self) -> None:
        """Make the next digest see the weights as the work queued so far leaves them."""
        self._sums.mark()

    def digests_of_all(self) -> tuple[int, ...]:
        """Return the digests of every weight that stays in place on the device; waits for them."""
        self._sums.mark()
        return self._sums.begin([getattr(*place) for place in self._all_places]).result()

    def begin(self) -> PendingDigests:
        """Start a digest; returns at once."""
        return self._sums.begin([getattr(*place) for place in self._places])


class Freshness:
    """Knows which epochs' blocks are stale: of other weights than now. Owns the comparisons.

    Without weights to check, no epoch is ever stale.
    """

    def __init__(
        self, weights: Weights | None = None, first: tuple[int, ...] | None = None
    ) -> None:
        """``first`` is the digest of the weights that the namespace of lasting tiers names."""
        self._weights = weights
        self.epoch: int | None = None
        self._stale_until = -1  # the newest stale epoch; epochs grow
        self.unreported: tuple[int, ...] = ()
        """Stale epochs that the scheduler side does not know of yet."""
        self._first = self._known = first
        self.is_marked = False
        """Whether a digest is marked that :meth:`look` has not started yet."""
        self._pending: PendingDigests | None = None
        self._before_sleep: tuple[int, ...] | None = None

    def enter(self, epoch: int) -> None:
        """Begin the steps of another epoch.

        Stores from now on belong to the weights of this step, so a weight update that came with a
        reset does not cause another reset.
        """
        if epoch == self.epoch:
            return
        self._compare()
        if self.epoch is not None:  # the first epoch has the weights of the digest ``first``
            self._known = None
        self.epoch = epoch
        self.mark()

    def mark(self) -> None:
        """Mark a digest, for a step that loads: its blocks must match the weights as of now."""
        if self._weights is not None:
            self._compare()
            self._weights.mark()
            self.is_marked = True

    def fall_asleep(self) -> None:
        """Take digests of all weights before their device memory may be given back."""
        if self._weights is not None and self.epoch is not None:
            self._compare()
            self._before_sleep = self._read(lambda weights: weights.digests_of_all())

    def look(self) -> None:
        """Start the marked digest; call it when the step's own work is queued."""
        if self.is_marked:
            self.is_marked = False
            self._pending = self._read(lambda weights: weights.begin())

    @property
    def is_known(self) -> bool:
        """Whether the last marked digest is complete; if not, :meth:`is_stale` waits for it."""
        self.look()
        is_awake = self._before_sleep is None
        return is_awake and (self._pending is None or self._pending.is_done)

    def is_stale(self, epoch: int) -> bool:
        """Whether the weights have changed since blocks of this epoch were computed."""
        if self._pending is not None or self.is_marked or self._before_sleep is not None:
            self._compare()
        return epoch <= self._stale_until

    def is_first(self) -> bool:
        """Whether the weights are those named by the namespace of lasting tiers."""
        self._compare()
        return self._known is not None and self._known == self._first

    def _compare(self) -> None:
        if self._before_sleep is not None:  # compared only now, when a step needs the weights
            before, self._before_sleep = self._before_sleep, None
            now = self._read(lambda weights: weights.digests_of_all())
            if now is not None and now != before:
                self._note_stale()
        self.look()
        pending, self._pending = self._pending, None
        digests = self._read(lambda _: pending.result()) if pending is not None else None
        if digests is not None:
            if self._known is not None and digests != self._known:
                self._note_stale()
            self._known = digests

    def _read(self, read: Callable[[Weights], _T]) -> _T | None:
        """Return ``read(weights)``; if that raises, count the weights as changed."""
        if self._weights is None:
            return None
        try:
            return read(self._weights)
        except Exception:
            log.exception(
                "kvferry cannot look at the model's weights; reset its cache after updates"
            )
            self._weights = None
            self._note_stale()
            return None

    def _note_stale(self) -> None:
        assert self.epoch is not None
        self._stale_until = max(self._stale_until, self.epoch)
        self.unreported = (*self.unreported, self.epoch)
