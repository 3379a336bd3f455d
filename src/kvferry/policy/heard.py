"""What was heard of requests: what each goes on with, and what that makes its blocks worth."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.policy.hazards import ENDS, NUM_BUCKETS
from kvferry.policy.recent import LISTED, Known, Listed, RecentBlocks, Words
from kvferry.policy.records import Records
from kvferry.policy.traits import (
    Said,
    TurnKind,
    conversation,
    shared,
    with_answer,
    with_said,
)
from kvferry.policy.worth_table import NO_ROW, WorthTable

NO_RECORD = -1
_LEARN_EVERY = 16  # requests, at first
_LEARN_LATER = 64  # and once most is learned
_FIRST = 1024
_MOSTLY = 2  # a request goes on with one of whose blocks it has at least one in so many
_RECORDS = 1 << 15
_FIRST_BLOCKS, _LEAST_BLOCKS, _MOST_BLOCKS = 1 << 9, 1 << 14, 1 << 20


class Heard:
    """Requests and their answers, in records. Owns the recent blocks, the records and the model.

    Knows no slots. ``now`` never goes back.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = RecentBlocks(
            min(max(4 * num_slots, _FIRST_BLOCKS), _MOST_BLOCKS),
            min(max(4 * num_slots, _LEAST_BLOCKS), _MOST_BLOCKS),
        )
        self.num_asked = 0
        self._latest: tuple[int, int] = (NO_RECORD, 0)  # a record, and its last block's word
        self.before = NO_RECORD
        """The record that the latest request goes on with."""
        self.records = Records(_RECORDS)
        self.table = WorthTable()
        self.unknown = self.table.row(conversation(turn=1, gap=None, grown=0, kind=TurnKind.NEW))
        """The row for what nothing is known of."""

    def asked(self, keys: Keys, num_tokens: int, now: float) -> int:
        """A request came; returns its record."""
        self.num_asked += 1
        every = _LEARN_EVERY if self.num_asked < _FIRST else _LEARN_LATER
        if self.num_asked % every == 0:
            self.records.teach(self.table.learn, now)
        record = self._recorded(self._recent.listed(keys), num_tokens, now)
        self._latest = (record, keys.array.item(-1, 0))
        return record

    def _recorded(self, words: Words, num_tokens: int, now: float) -> int:
        """A new record of a request: what it goes on with, if anything, and what it shares."""
        listed = self._recent.find(words)
        known = self._recent.look(listed)
        at = None
        if known.depth > known.shared:
            at = self.records.place(known.record)
        turn, kind, row = 1, TurnKind.NEW, self.table.used(self.unknown)
        self.before = NO_RECORD
        if at is not None:
            facts = self.records.facts(at)
            if known.depth * _MOSTLY >= facts.length:
                self.records.returns(known.record, now)
                self.before = known.record
                turn, gap = facts.turn + 1, now - self.records.time.item(at)
                grown = num_tokens - facts.tokens
                kind = TurnKind.GOES_ON if known.depth >= facts.length else TurnKind.BRANCHES
                row = self.table.row(conversation(turn=turn, gap=gap, grown=grown, kind=kind))
        if kind is not TurnKind.GOES_ON:
            known = self._recent.shared_up_to(listed, known)
        record = self.records.add(now, row, length=len(words), turn=turn, tokens=num_tokens)
        self._recent.note(listed, record, 0 if kind is TurnKind.GOES_ON else known.depth)
        if known.ways:  # the first to go another way tells little: an edited question does so
            self._share(listed, record, known, now)
        return record

    def _share(self, listed: Listed, record: int, known: Known, now: float) -> None:
        """Record that the part of a request which others have, too, was asked for again."""
        by = self.records.place(known.sharer)
        gap = 0.0
        if by is not None:
            gap = now - self.records.time.item(by)
            self.records.returns(known.sharer, now)
        ways = known.ways + 1
        row = self.table.row(shared(ways=ways, gap=gap))
        self._recent.share(listed, known.shared, self.records.add(now, row))
        at = self.records.place(record)
        if at is not None:
            self.records.share(at, LISTED.item(known.shared - 1) + 1, row, ways)

    def answered(self, keys: Keys, num_tokens: int, now: float) -> tuple[int, int]:
        """A request was answered; returns its record as it was, and as it is from now on."""
        record, last = self._latest
        listed = None
        if last != keys.array.item(-1, 0):
            listed = self._recent.find(self._recent.listed(keys))
            record = self._recent.deepest(listed)
        at = self.records.place(record)
        if at is None:
            return NO_RECORD, NO_RECORD
        before, facts = record, self.records.facts(at)
        row = self.table.row(with_answer(self.table.traits(facts.row), num_tokens))
        length = len(listed.words) if listed is not None else facts.length
        if self.records.time.item(at) == now:
            self.records.amend(at, row, length)
        else:  # it is from now on that nobody has gone on with it
            record = self.records.renew(record, now, row, length)
            self._latest = (record, keys.array.item(-1, 0))
            if listed is None:
                listed = self._recent.find(self._recent.listed(keys))
        if listed is not None:
            self._recent.note(listed, record)
        return before, record

    def said(self, record: int, said: Said, until: float | None = None) -> None:
        """Whoever sent a request knows more of its conversation: it may go on ``until`` then."""
        at = self.records.place(record)
        if at is not None:
            facts = self.records.facts(at)
            within = until - self.records.time.item(at) if until is not None else None
            row = self.table.row(with_said(self.table.traits(facts.row), said, within))
            self.records.amend(at, row, facts.length)

    # -- what it makes of blocks ----------------------------------------------------------------

    def latest_with(self, keys: Keys) -> int | None:
        """The latest request, if the last of these blocks was its last one, too."""
        record, last = self._latest
        return record if last == keys.array.item(-1, 0) else None

    def record_of(self, keys: Keys) -> int:
        """The last request that had the last of these blocks, as far as is known."""
        latest = self.latest_with(keys)
        if latest is not None:
            return latest
        return self._recent.deepest(self._recent.find(keys.array[:, 0].view(np.int64)))

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each block its last request, as far as is known; else that of the one before it."""
        records = self._recent.records_of(keys)
        known = np.where(records >= 0, np.arange(len(keys)), 0)
        return records.take(np.maximum.accumulate(known))

    def is_deeper(self, key: Keys, than: Keys) -> bool:
        """Whether one block of a conversation comes behind another."""
        return bool(self._recent.depths_of(key)[0] > self._recent.depths_of(than)[0])

    def row(self, record: int) -> int:
        """Where the table says what a request's own blocks are worth."""
        at = self.records.place(record)
        return self.unknown if at is None else self.table.used(self.records.row(at))

    def time(self, record: int, now: float) -> float:
        """When a request was last heard of; now, where that is not known."""
        at = self.records.place(record)
        return now if at is None else self.records.time.item(at)

    def shared(self, record: int) -> tuple[int, int, int]:
        """How many leading blocks of it others have too, their row, and the ways from there."""
        at = self.records.place(record)
        return (0, NO_ROW, 0) if at is None else self.records.shared(at)

    def common_row(self, ways: int, gap: float) -> int:
        """The row of what several share, passed so long ago before."""
        return self.table.row(shared(ways=ways, gap=gap))

    def worths(
        self,
        rows: npt.NDArray[np.int64],
        commons: npt.NDArray[np.int64],
        ages: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """What blocks are worth at these ages: by their conversation, and by others."""
        self.table.follow(rows)
        self.table.work_out(commons)
        buckets = ENDS.searchsorted(ages, "right")
        np.minimum(buckets, NUM_BUCKETS - 1, out=buckets)
        table = self.table.worth.reshape(-1)
        worths = table.take(rows * NUM_BUCKETS + buckets)
        worths += table.take(commons * NUM_BUCKETS + buckets)
        return worths

    def bids(self, record: int) -> tuple[float, float]:
        """What a newcomer's own blocks are worth, and those that it shares."""
        row, (_, common, _) = self.row(record), self.shared(record)
        own = self.table.first(row)
        return own, own + self.table.first(common) if common != NO_ROW else own
