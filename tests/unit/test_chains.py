"""Chains against a dict of parents: any forest, any part of it, in any order."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.slots import Chains, as_slots
from kvferry.types import NO_SLOT

NUM_SLOTS = 12


class Forest:
    """A family and a dict that are told the same."""

    def __init__(self, parents: dict[int, int]) -> None:
        self.chains = Chains(NUM_SLOTS)
        self.parents = parents
        for child, parent in parents.items():
            self.chains.link(as_slots([child]), as_slots([parent]))

    def descendants(self, slot: int) -> set[int]:
        children = {child for child, parent in self.parents.items() if parent == slot}
        return children.union(*map(self.descendants, children))

    def check(self) -> None:
        living = np.ones(NUM_SLOTS, dtype=bool)
        self.chains.check(living)
        for slot in range(NUM_SLOTS):
            assert self.chains.parent_of(slot) == self.parents.get(slot, NO_SLOT)


@st.composite
def forests(draw: st.DrawFn) -> dict[int, int]:
    """Chains in runs of slots, as stores leave them, and branches anywhere; no rings."""
    order = draw(st.one_of(st.just(list(range(NUM_SLOTS))), st.permutations(range(NUM_SLOTS))))
    parents: dict[int, int] = {}
    for at in range(1, NUM_SLOTS):
        kind = draw(st.sampled_from(("next", "next", "branch", "root")))
        if kind == "next":
            parents[order[at]] = order[at - 1]
        elif kind == "branch":
            parents[order[at]] = order[draw(st.integers(0, at - 1))]
    return parents


parts = st.one_of(
    st.permutations(range(NUM_SLOTS)),
    st.tuples(st.integers(0, NUM_SLOTS), st.integers(0, NUM_SLOTS)).map(
        lambda ends: list(range(min(ends), max(ends)))
    ),
).flatmap(
    lambda slots: st.tuples(st.integers(0, NUM_SLOTS), st.booleans()).map(
        lambda cut: slots[: cut[0]][:: -1 if cut[1] else 1]
    )
)


@given(forests(), parts)
@settings(max_examples=300)
def test_what_can_go_leaves_no_descendant_behind(parents: dict[int, int], part: list[int]) -> None:
    forest = Forest(parents)
    expected = [forest.descendants(slot) <= set(part) for slot in part]
    assert forest.chains.can_go(as_slots(part)).tolist() == expected
    forest.check()


@given(forests(), parts)
@settings(max_examples=300)
def test_unlinked_slots_have_no_parent_and_no_child(
    parents: dict[int, int], part: list[int]
) -> None:
    forest = Forest(dict(parents))
    forest.chains.unlink(as_slots(part))
    forest.parents = {
        child: parent
        for child, parent in parents.items()
        if child not in part and parent not in part
    }
    forest.check()


@given(forests(), parts)
@settings(max_examples=300)
def test_leaving_with_all_descendants_keeps_the_rest_sound(
    parents: dict[int, int], part: list[int]
) -> None:
    forest = Forest(dict(parents))
    slots = as_slots(part)
    going = slots[forest.chains.can_go(slots)]
    if len(going):
        forest.chains.leave(going)
    forest.parents = {child: up for child, up in parents.items() if child not in going.tolist()}
    forest.check()


@given(forests(), parts, parts)
def test_descendants_of_lost_slots_are_found(
    parents: dict[int, int], part: list[int], lost: list[int]
) -> None:
    forest = Forest(parents)
    after = set().union(*map(forest.descendants, lost))
    expected = [slot in after for slot in part]
    assert forest.chains.follow(as_slots(part), as_slots(lost)).tolist() == expected


def test_a_chain_that_leaves_whole_costs_no_look_at_every_slot() -> None:
    forest = Forest({slot: slot - 1 for slot in range(1, NUM_SLOTS)})
    with mock.patch.object(np, "isin", side_effect=AssertionError("a look at every slot")):
        forest.chains.unlink(np.arange(NUM_SLOTS)[:3:-1])
        forest.parents = {slot: slot - 1 for slot in range(1, 4)}
        forest.check()
        forest.chains.unlink(as_slots([0, 2, 1, 3]))
        forest.parents = {}
        forest.check()


@given(forests())
def test_children_come_before_their_parents(parents: dict[int, int]) -> None:
    forest = Forest(parents)
    order = forest.chains.children_first(np.arange(NUM_SLOTS)).tolist()
    assert sorted(order) == list(range(NUM_SLOTS))
    for child, parent in parents.items():
        assert order.index(child) < order.index(parent)
