"""What an index may say after a crash: the history of notes, and which of them were promised."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.keys import Key
from kvferry.tiers.disk.index import DiskIndex

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

    def moment(self) -> tuple[int, int]:
        return len(self.events), self.promised

    def check(self, content: Content, noted: int, promised: int, *, damaged: bool = False) -> None:
        """Hold what was recovered against a moment of this history.

        Nothing that was never noted, and nothing forgotten. Unless the medium was damaged, nothing
        that a promised note contradicts, and everything promised that no later note touches.
        """
        events = self.events[:noted]
        gone = max(
            (at for at, event in enumerate(events[:promised]) if isinstance(event, Forgot)),
            default=-1,
        )
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
            later = events[at + 1 : promised]
            assert damaged or not any(_is_about(event, place) for event in later), (
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
            assert content.get(event.place) == (event.key, event.proof), f"lost: {event}"


def _is_about(event: Event, place: int) -> bool:
    return isinstance(event, Forgot) or event.place == place


def content_of(index: DiskIndex) -> Content:
    """What an index that was just opened has recovered; its parts must agree."""
    keys, places = index.take_recovered()
    content: Content = {}
    for key, place in zip(keys, places.tolist(), strict=True):
        assert place not in content
        content[place] = (key, index.proofs[place].tobytes())
    assert set(content) == set(index.present.nonzero()[0].tolist())
    assert index.report.num_blocks == len(content)
    return content
