"""What a journal may say after a crash: the history of notes, and which of them were promised."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.keys import Key
from kvferry.tiers.disk.journal import DiskJournal

Content = dict[int, tuple[Key, bytes]]
"""Place to key and proof."""


@dataclass(frozen=True)
class Wrote:
    """One block to one place. Proofs are never used twice, so they name the note."""

    place: int
    key: Key
    proof: bytes


@dataclass(frozen=True)
class Lost:
    place: int


class Forgot:
    pass


Event = Wrote | Lost | Forgot


@dataclass
class History:
    """All notes in their order; those before ``promised`` were answered for by a commit."""

    events: list[Event] = field(default_factory=list)
    promised: int = 0

    @property
    def last_forgotten(self) -> int:
        """How many events there were when last everything was forgotten."""
        return max(
            (at + 1 for at, event in enumerate(self.events) if isinstance(event, Forgot)), default=0
        )

    def moment(self) -> tuple[int, int]:
        return len(self.events), self.promised

    def check(self, content: Content, noted: int, promised: int, *, damaged: bool = False) -> None:
        """Hold what was recovered against a moment of this history.

        Nothing that was never noted, nothing forgotten, nothing that a promised note contradicts;
        and everything promised that no later note touches, unless the medium was damaged.
        """
        events = self.events[:noted]
        gone = max(
            (at for at, event in enumerate(events[:promised]) if isinstance(event, Forgot)),
            default=-1,
        )
        assert len({key for key, _ in content.values()}) == len(content), "a key at two places"
        wrotes = [Wrote(place, *what) for place, what in content.items()]
        for wrote in wrotes:
            assert wrote in events, f"never noted: {wrote}"
        numbers = [events.index(wrote) for wrote in wrotes]
        if any(isinstance(event, Forgot) for event in events[: max(numbers, default=0)]):
            # What came after it is there: then so is the forgetting, promised or not.
            before = events[: max(numbers)]
            gone = max(gone, max(n for n, event in enumerate(before) if isinstance(event, Forgot)))
        for wrote, at in zip(wrotes, numbers, strict=True):
            place = wrote.place
            assert at > gone, f"forgotten: {wrote}"
            assert not any(_is_about(event, place) for event in events[at + 1 : promised]), (
                f"contradicted: {wrote}"
            )
        if not damaged:
            self._check_promises(content, events, gone, promised)

    def _check_promises(
        self, content: Content, events: list[Event], gone: int, promised: int
    ) -> None:
        for at in range(gone + 1, promised):
            event = events[at]
            if not isinstance(event, Wrote):
                continue
            later = events[at + 1 :]
            if any(_is_about(other, event.place) for other in later):
                continue
            if any(isinstance(other, Wrote) and other.key == event.key for other in later):
                continue
            assert content.get(event.place) == (event.key, event.proof), f"lost: {event}"


def _is_about(event: Event, place: int) -> bool:
    return isinstance(event, Forgot) or event.place == place


def content_of(journal: DiskJournal) -> Content:
    """What a journal that was just opened has recovered; its parts must agree."""
    content: Content = {}
    for some, places, proofs in journal.pieces():
        for key, place, proof in zip(some, places.tolist(), proofs, strict=True):
            assert place not in content
            content[place] = (key, proof.tobytes())
    assert set(content) == set(journal.present.nonzero()[0].tolist())
    for place, (_, proof_bytes) in content.items():
        assert journal.proofs[place].tobytes() == proof_bytes
    assert journal.report.num_blocks == len(content)
    return content
