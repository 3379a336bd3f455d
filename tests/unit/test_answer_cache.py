"""The memory of answers: against a dict that forgets in the same order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys

from kvferry.errors import InputError
from kvferry.scheduler.tier import AnswerCache

NUM_KEYS = 12
numbers = st.lists(st.integers(0, NUM_KEYS - 1), unique=True, max_size=8)
steps = st.lists(
    st.tuples(
        st.sampled_from(["answer", "sent", "doubt", "clear", "wait"]), numbers, st.integers(0, 255)
    ),
    max_size=12,
)


@dataclass
class Known:
    there: bool = False
    until: float = -1.0
    sent: bool = False


class Plain:
    """The same in plain words: a ring of keys, and what is known of those in it."""

    def __init__(self, capacity: int) -> None:
        self.ring: list[int | None] = [None] * capacity
        self.known: dict[int, Known] = {}
        self.next = 0

    def mention(self, numbers: list[int]) -> list[Known]:
        """These take the next places; what was known of them stays."""
        before = [self.known.pop(number, Known()) for number in numbers]
        self.ring = [None if number in numbers else number for number in self.ring]
        for number, known in zip(numbers, before, strict=True):
            self.known.pop(self.ring[self.next], None)  # type: ignore[arg-type]
            self.ring[self.next] = number
            self.known[number] = known
            self.next = (self.next + 1) % len(self.ring)
        return before


@given(capacity=st.sampled_from([1, 3, 8, 20]), life=steps)
def test_it_remembers_what_a_dict_would(
    capacity: int, life: list[tuple[str, list[int], int]]
) -> None:
    memory, plain, now = AnswerCache(capacity), Plain(capacity), 0.0
    for what, chosen, bits in life:
        there = [bool(bits >> at & 1) for at in range(len(chosen))]
        if what == "answer":
            memory.answer(keys(chosen), np.array(there, dtype=bool), now + 2)
            for known, yes in zip(plain.mention(chosen[:capacity]), there, strict=False):
                known.there, known.until, known.sent = yes, now + 2, known.sent and yes
        elif what == "sent":
            memory.note_sent(keys(chosen))
            for known in plain.mention(chosen[:capacity]):
                known.sent = True
        elif what == "doubt":
            memory.doubt()
            for known in plain.known.values():
                known.until = -1.0
        elif what == "clear":
            memory.clear()
            plain.known.clear()
            plain.ring = [None] * capacity
        else:
            now += 1.5
        every = keys(range(NUM_KEYS))
        known_of = [plain.known.get(number, Known()) for number in range(NUM_KEYS)]
        found = memory.lookup(every, now)
        assert found.readable.tolist() == [k.there and k.until > now for k in known_of]
        assert found.unknown.tolist() == [k.until <= now for k in known_of]
        is_sent = [k.sent or (k.there and k.until > now) for k in known_of]
        assert found.known.tolist() == is_sent
        assert len(memory) == len(plain.known) <= capacity


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_memory_for_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(InputError, match=f"got {capacity}"):
        AnswerCache(capacity)
