"""The last requests and what was copied for them: a memory with a bound, for whoever asks why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import EventKind
from kvferry.cache.policies.admission import SeenOften
from kvferry.cache.policies.load_or_compute import Decision
from kvferry.cache.pool import Pool
from kvferry.core.identity import scope
from kvferry.core.keys import Keys, masked_key
from kvferry.hints import Hints
from kvferry.scheduler.hits import PinnedHit
from kvferry.scheduler.lookup import Matcher, Missing
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import Flight
from kvferry.types import Key, RequestId, Transfer


class Reason(Enum):
    """Why the first token that could not be had from here could not."""

    NOTHING_MISSED = "nothing_missed"  # all that was asked for could be had
    EVICTED = "evicted"  # it was here; the room was needed, or a copy of it failed
    NEVER_STORED = "never_stored"  # nobody computed it yet, or it found no room
    BELOW_THRESHOLD = "below_threshold"  # not asked for often enough to be stored
    IN_FLIGHT = "in_flight"  # its bytes are still on their way in
    OTHER_NAMESPACE = "other_namespace"  # stored before a reset or a change of weights
    NOT_PROMOTED = "not_promoted"  # on a lower tier, and not brought up in time
    TIER_UNAVAILABLE = "tier_unavailable"  # on a lower tier that cannot be used now
    LOAD_SLOWER = "load_slower"  # it is here or below, but computing it was judged faster
    HINT = "hint"  # a hint said that nothing is to be loaded for this request


class Explanation(NamedTuple):
    """What one request could be given when it was looked up, and why no more.

    ``device_tokens`` the engine had, ``host_tokens`` more could be loaded, of ``asked_tokens`` in
    all; ``lower_tokens`` of those asked for lay only below the host. ``first_missing`` is the first
    token not to be had, in ``group``. Tiers that know keys themselves were asked for
    ``asked_blocks`` of it; ``tiers_away`` names those that could not be used, and why.
    """

    request_id: RequestId
    asked_tokens: int
    device_tokens: int
    host_tokens: int
    lower_tokens: int
    reason: Reason
    first_missing: int | None = None
    group: int | None = None
    decision: Decision | None = None
    asked_blocks: int = 0
    tiers_away: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        plain: dict[str, object] = {**self._asdict(), "reason": self.reason.value}
        if self.decision is not None:
            verdict = self.decision.verdict.value
            plain["decision"] = {**self.decision._asdict(), "verdict": verdict}
        return plain


# ------------------------------------------------------------------------------------------------
# The last requests and what was copied for them: a memory with a bound, for whoever asks why.

MOST_REQUESTS = 1024
MOST_COPIES = 32
"""Of one request; a long one stores a little in many steps, and its last copies tell enough."""


@dataclass(frozen=True)
class Copy:
    """One transfer that ended for a request (a store may have carried others' blocks too).

    Bytes are summed over ranks, seconds are the slowest rank's. ``paths`` are those the ranks took,
    ``beside_model`` says that a rank chose its own while the model ran, ``num_runs`` in how many
    pieces the host slots lay for it.
    """

    transfer_id: int
    src: str
    dst: str
    group: int
    num_blocks: int
    num_bytes: int
    seconds: float
    paths: tuple[str, ...]
    reason: str = ""
    beside_model: bool = False
    num_runs: int = 1

    @classmethod
    def of(cls, flight: Flight, transfer: Transfer) -> Copy:
        num_bytes, seconds, num_runs, beside_model = 0, 0.0, 1, False
        paths = set()
        for receipt in flight.receipts:  # one for each rank
            num_bytes += receipt.num_bytes
            seconds = max(seconds, receipt.seconds)
            num_runs = max(num_runs, receipt.num_runs)
            beside_model |= receipt.beside_model
            paths.add(receipt.path)
        paths.discard("")
        return cls(
            transfer_id=transfer.id,
            src=transfer.src,
            dst=transfer.dst,
            group=transfer.group,
            num_blocks=max(len(transfer.src_slots), len(transfer.dst_slots)),
            num_bytes=num_bytes,
            seconds=seconds,
            paths=tuple(sorted(paths)),
            reason=flight.reason or flight.note,
            beside_model=beside_model,
            num_runs=num_runs,
        )


@dataclass(slots=True)
class Entry:
    """What is remembered of one request."""

    explanation: Explanation | None = None
    hints: Hints | None = None
    refused: tuple[str, ...] = ()
    """What of the hints could not be heeded, and why."""
    overlap: str = ""
    """How its load went together with the forward pass, where somebody decided that."""
    copies: list[Copy] = field(default_factory=list)


class Journal:
    """Remembers the latest requests; the one longest untouched is forgotten first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[RequestId, Entry] = OrderedDict()

    def explained(self, explanation: Explanation, *, is_new: bool) -> None:
        """A request was looked up; this replaces what was said about it before.

        Where it ``is_new``, what another of the same name did is forgotten as well.
        """
        if is_new:
            self._entries.pop(explanation.request_id, None)
            self._entries[explanation.request_id] = Entry(explanation)
            if len(self._entries) > MOST_REQUESTS:
                self._entries.popitem(last=False)
        else:
            self._touch(explanation.request_id).explanation = explanation

    def ended(self, request_id: RequestId, flight: Flight) -> None:
        """A transfer ended that moved blocks of this request, or it waits no longer for it."""
        if isinstance(flight.transfer, Transfer):  # a question copies nothing
            copy = Copy.of(flight, flight.transfer)
            copies = self._touch(request_id).copies
            copies.append(copy)
            del copies[:-MOST_COPIES]

    def wished(self, request_id: RequestId, hints: Hints, refused: Sequence[str]) -> None:
        """Something was said of a request's blocks, and this could not be heeded."""
        entry = self._touch(request_id)
        entry.hints, entry.refused = hints, tuple(refused)

    def overlapped(self, request_id: RequestId, words: str) -> None:
        """It was decided how a request's load goes together with the forward pass."""
        self._touch(request_id).overlap = words

    def entry(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """All that are remembered, the latest last."""
        return tuple(self._entries)

    def _touch(self, request_id: RequestId) -> Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = Entry()
            if len(self._entries) > MOST_REQUESTS:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(request_id)
        return entry


# ------------------------------------------------------------------------------------------------
# Remembers, roughly, which keys were here once: to tell "evicted" from "never stored".


class Ghosts:
    """A table with one place per bucket that holds part of the last key put there.

    Owns nothing that matters: a newer ghost may replace an older one, and the answer serves people
    who ask why, never a decision.
    """

    def __init__(self, num_keys: int) -> None:
        size = 1 << max(10, (4 * num_keys - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._seen = np.zeros(size, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        self._seen[self._places(keys)] = keys.array[:, 1]

    def has(self, key: Key) -> bool:
        """Whether this one key is remembered."""
        place = int.from_bytes(key[:8], "little") & int(self._mask)
        return bool(self._seen.item(place) == int.from_bytes(key[8:16], "little"))

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys.array[:, 0] & self._mask).astype(np.int64)


# ------------------------------------------------------------------------------------------------
# Finds out why a look-up ended where it did.


_MOST_UNREAD = 256
"""Evictions that wait to be remembered until a request is explained."""


class Explainer:
    """Explains looks. Owns the memory of what was here once; changes nothing else."""

    def __init__(
        self, matcher: Matcher, pool: Pool, admission: SeenOften, lower: LowerTiers
    ) -> None:
        self.has_tiers = bool(lower)
        self._matcher = matcher
        self._lower = lower
        self._admission = admission
        self._ghosts = Ghosts(pool.num_slots)
        self._evicted = pool.log.reader((EventKind.EVICT,), most=_MOST_UNREAD)

    def close(self) -> None:
        self._evicted.close()

    def explain(
        self,
        request_id: RequestId,
        hit: PinnedHit,
        asked_blocks: int = 0,
        declined: Decision | None = None,
    ) -> Explanation:
        """``asked_blocks`` of it tiers were asked for; ``declined`` what they had, for speed."""
        if len(self._evicted):
            self._read_evictions()
        look, decision = hit.look, hit.decision
        missing = look.missing
        if decision is not None and hit.is_declined:
            reason, group, token = Reason.LOAD_SLOWER, None, look.computed_tokens
        elif declined is not None and missing is not None:
            reason, group, token = Reason.LOAD_SLOWER, missing.group, missing.token
            decision = declined
        elif missing is None:
            reason, group, token = Reason.NOTHING_MISSED, None, None
        else:
            group, token = missing.group, missing.token
            below = look.all_tokens > look.host_tokens
            reason = Reason.NOT_PROMOTED if below else self._why_missing(missing)
        return Explanation(
            request_id=request_id,
            asked_tokens=look.max_tokens,
            device_tokens=look.computed_tokens,
            host_tokens=look.host_tokens - look.computed_tokens,
            lower_tokens=look.all_tokens - look.host_tokens,
            reason=reason,
            first_missing=token,
            group=group,
            decision=decision,
            asked_blocks=asked_blocks,
            tiers_away=self._lower.away if self.has_tiers else (),
        )

    def explain_miss(
        self,
        request_id: RequestId,
        missing: Missing,
        *,
        computed_tokens: int,
        max_tokens: int,
    ) -> Explanation:
        """Nothing could be had because of this one slot."""
        return Explanation(
            request_id=request_id,
            asked_tokens=max_tokens,
            device_tokens=computed_tokens,
            host_tokens=0,
            lower_tokens=0,
            reason=self._why_missing(missing),
            first_missing=missing.token,
            group=missing.group,
            decision=None,
        )

    def _read_evictions(self) -> None:
        for event in self._evicted.take():
            self._ghosts.add(event.all_keys())

    def _why_missing(self, missing: Missing) -> Reason:
        group, key = missing.group, missing.key
        if missing.is_coming:
            return Reason.IN_FLIGHT
        if self.has_tiers and self._lower.has_out_of_reach(key):
            return Reason.TIER_UNAVAILABLE
        self._read_evictions()
        if self._ghosts.has(key):
            return Reason.EVICTED
        if self._admission.counts and not self._admission.admits(Keys.from_bytes((key,)))[0]:
            return Reason.BELOW_THRESHOLD
        before = self._matcher.epoch_before
        if before is not None:
            bare = masked_key(key, scope(self._matcher.epoch, group))
            if self._ghosts.has(masked_key(bare, scope(before, group))):
                return Reason.OTHER_NAMESPACE
        return Reason.NEVER_STORED
