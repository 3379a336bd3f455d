"""What each kind of group needs, said with the numbers of real models."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.cache.reach import (
    BoolArray,
    ChunkedLocal,
    FullAttention,
    Group,
    RecurrentState,
    SlidingWindow,
    can_serve,
    hit_alignment,
    longest_hit,
    needed,
    worth_storing,
)
from kvferry.errors import InputError


def mask(bits: str) -> BoolArray:
    """Presence as a drawing: ``#`` is there, ``.`` is not."""
    return np.array([bit == "#" for bit in bits], dtype=np.bool_)


def drawn(bits: BoolArray) -> str:
    return "".join("#" if bit else "." for bit in bits)


class TestNeeded:
    def test_full_attention_needs_everything(self) -> None:
        assert needed(FullAttention(16), 4096) == range(256)

    def test_a_window_does_not_count_the_query_among_the_cached_keys(self) -> None:
        # 128 keys, of which the query is one: 127 cached tokens, 8 blocks of 16.
        assert needed(SlidingWindow(16, window=128), 4096) == range(248, 256)
        # 129 keys: 128 cached tokens still fill 8 blocks exactly; one more needs a ninth.
        assert needed(SlidingWindow(16, window=129), 4096) == range(248, 256)
        assert needed(SlidingWindow(16, window=130), 4096) == range(247, 256)

    def test_a_window_longer_than_the_hit_needs_everything(self) -> None:
        assert needed(SlidingWindow(16, window=1024), 64) == range(4)

    def test_a_window_of_one_needs_nothing(self) -> None:
        assert not needed(SlidingWindow(16, window=1), 24)

    def test_a_chunk_is_needed_from_its_start(self) -> None:
        assert needed(ChunkedLocal(16, chunk=8192), 8192 + 64) == range(512, 516)

    def test_a_hit_at_a_chunk_start_needs_nothing(self) -> None:
        assert not needed(ChunkedLocal(16, chunk=8192), 8192)
        # Nor does it where the chunk starts inside a slot.
        assert not needed(ChunkedLocal(16, chunk=24), 24)

    def test_a_state_is_needed_at_the_end_only(self) -> None:
        assert needed(RecurrentState(512), 4096) == range(7, 8)
        assert not needed(RecurrentState(512), 0)

    def test_a_state_has_no_middle(self) -> None:
        with pytest.raises(InputError, match=r"no hit of 100 tokens.*every 512 tokens"):
            needed(RecurrentState(512), 100)

    def test_what_the_engine_holds_is_left_out(self) -> None:
        assert needed(FullAttention(16), 160, computed_tokens=64) == range(4, 10)
        assert needed(SlidingWindow(16, window=64), 160, computed_tokens=144) == range(9, 10)
        assert needed(RecurrentState(16), 160, computed_tokens=144) == range(9, 10)
        assert not needed(FullAttention(16), 160, computed_tokens=160)

    def test_large_blocks_with_ragged_ends(self) -> None:
        # The engine holds half of the first block; the hit ends inside the second.
        assert needed(FullAttention(64), 7 * 16, computed_tokens=2 * 16) == range(2)

    def test_a_window_takes_no_blocks_it_will_not_read(self) -> None:
        assert needed(SlidingWindow(64, window=33), 128) == range(1, 2)


class TestAlignment:
    def test_hits_end_where_every_slot_and_hash_block_ends(self) -> None:
        groups = [FullAttention(48), RecurrentState(32)]
        assert hit_alignment(groups) == 96
        assert hit_alignment(groups, hash_block_tokens=64) == 192

    def test_a_given_alignment_may_end_inside_a_slot(self) -> None:
        # A prompt of exactly two blocks must compute its last token; with the hash block as the
        # step only that part is computed again, not the whole block.
        group = FullAttention(64)
        assert longest_hit([group], [mask("##")], 127) == 64
        assert longest_hit([group], [mask("##")], 127, alignment=16) == 112

    def test_a_given_alignment_still_stops_only_at_snapshots(self) -> None:
        groups = [FullAttention(16), RecurrentState(64)]
        assert longest_hit(groups, [mask("########"), mask("##")], 127, alignment=16) == 64


class TestLongestHit:
    def test_full_attention_ends_at_the_first_gap(self) -> None:
        assert longest_hit([FullAttention(16)], [mask("###.##")], 1000) == 48

    def test_a_window_survives_gaps_it_has_passed(self) -> None:
        group = SlidingWindow(16, window=33)
        assert longest_hit([group], [mask("#...##")], 1000) == 96

    def test_a_window_falls_back_to_a_shorter_hit(self) -> None:
        groups = [FullAttention(16), SlidingWindow(16, window=33)]
        assert longest_hit(groups, [mask("######"), mask(".##.#.")], 1000) == 48

    def test_a_chunk_start_is_served_by_nothing(self) -> None:
        groups = [FullAttention(16), ChunkedLocal(16, chunk=64)]
        assert longest_hit(groups, [mask("######"), mask("......")], 1000) == 64

    def test_a_state_is_hit_where_a_snapshot_was_stored(self) -> None:
        groups = [FullAttention(16), RecurrentState(16)]
        assert longest_hit(groups, [mask("######"), mask(".#.#..")], 1000) == 64

    def test_all_groups_must_agree(self) -> None:
        groups: list[Group] = [
            FullAttention(16),
            SlidingWindow(32, window=40),
            RecurrentState(64),
        ]
        present = [mask("############"), mask("######"), mask("#.#")]
        assert longest_hit(groups, present, 192) == 192
        assert longest_hit(groups, present, 191) == 64
        present[1] = mask(".#####")
        assert longest_hit(groups, present, 191) == 0

    def test_slots_past_the_end_are_missing(self) -> None:
        groups = [FullAttention(16), SlidingWindow(16, window=17)]
        assert longest_hit(groups, [mask("####"), mask("##")], 1000) == 32
        assert longest_hit(groups, [mask("####"), mask("")], 1000) == 0

    def test_nothing_below_what_the_engine_holds_is_asked_for(self) -> None:
        groups = [FullAttention(16), SlidingWindow(16, window=33)]
        present = [mask("..####"), mask("...###")]
        assert longest_hit(groups, present, 1000) == 0
        assert longest_hit(groups, present, 1000, computed_tokens=32) == 96
        assert longest_hit(groups, present, 64, computed_tokens=32) == 32

    def test_never_less_than_what_the_engine_holds(self) -> None:
        assert longest_hit([FullAttention(16)], [mask("")], 100, computed_tokens=37) == 37
        assert longest_hit([RecurrentState(16)], [mask("")], 100, computed_tokens=37) == 37

    def test_draft_layers_can_ask_for_the_next_shorter_hit(self) -> None:
        groups = [FullAttention(16), SlidingWindow(16, window=33)]
        present = [mask("######"), mask("##.###")]
        found = longest_hit(groups, present, 1000)
        assert (found, longest_hit(groups, present, found - 1)) == (96, 80)

    def test_it_leaves_its_input_alone(self) -> None:
        present = mask("##.#")
        present.setflags(write=False)
        longest_hit([SlidingWindow(16, window=20)], [present], 64)
        worth_storing([SlidingWindow(16, window=20)], [present])
        assert drawn(present) == "##.#"


class TestWorthStoring:
    def test_full_attention_after_a_lost_slot_is_useless(self) -> None:
        (worthy,) = worth_storing([FullAttention(16)], [mask("##.##")])
        assert drawn(worthy) == "##..."

    def test_window_slots_without_their_neighbours_are_useless(self) -> None:
        # Every hit reads two slots; slot 1 has neither neighbour. The last one still has a future.
        (worthy,) = worth_storing([SlidingWindow(16, window=33)], [mask(".#.##..#")])
        assert drawn(worthy) == "...##..#"

    def test_only_snapshots_at_aligned_ends_serve(self) -> None:
        (worthy,) = can_serve([RecurrentState(16)], 128, alignment=64)
        assert drawn(worthy) == "...#...#"

    def test_a_short_window_serves_only_near_the_ends_of_hits(self) -> None:
        # State snapshots every 128 tokens, a window of 33: six slots of eight are never read.
        groups = [SlidingWindow(16, window=33), RecurrentState(128)]
        worthy, states = can_serve(groups, 256)
        assert drawn(worthy) == "......##......##"
        assert drawn(states) == "##"

    def test_a_lost_snapshot_makes_its_window_useless_too(self) -> None:
        groups = [FullAttention(16), SlidingWindow(16, window=33), RecurrentState(64)]
        held = [mask("#" * 12), mask("#" * 12), mask("#.#")]
        full, window, state = worth_storing(groups, held)
        assert drawn(full) == "############"
        assert drawn(window) == "..##......##"
        assert drawn(state) == "#.#"

    def test_a_lost_start_makes_everything_useless(self) -> None:
        groups = [FullAttention(16), RecurrentState(32)]
        full, state = worth_storing(groups, [mask(".###"), mask("##")])
        assert (drawn(full), drawn(state)) == ("....", "..")

    def test_what_was_lost_is_forgotten_beyond_its_chunk_or_window(self) -> None:
        # Some longer hit reads no lost slot any more, so full attention still serves to its end.
        for other in (ChunkedLocal(16, chunk=256), SlidingWindow(16, window=256)):
            full, local = worth_storing([FullAttention(16), other], [mask("####"), mask("#.##")])
            assert drawn(full) == "####"
            assert drawn(local) == ("#..." if isinstance(other, ChunkedLocal) else "#.##")

    def test_slots_before_the_next_end_wait_for_it(self) -> None:
        # 80 tokens so far, hits every 64: the fifth slot can only serve a hit yet to come.
        (worthy,) = worth_storing([SlidingWindow(16, window=64)], [mask("#####")], alignment=64)
        assert drawn(worthy) == "#####"
        (worthy,) = worth_storing([SlidingWindow(16, window=33)], [mask("#####")], alignment=64)
        assert drawn(worthy) == "..##."

    def test_what_a_hit_reads_is_worth_storing(self) -> None:
        groups = [FullAttention(16), ChunkedLocal(32, chunk=96), RecurrentState(64)]
        masks = can_serve(groups, 1024)
        for length in range(64, 1024, hit_alignment(groups)):
            for group, worthy in zip(groups, masks, strict=True):
                assert all(worthy[slot] for slot in needed(group, length))

    def test_no_tokens_no_slots(self) -> None:
        assert [len(worthy) for worthy in can_serve([FullAttention(16), RecurrentState(8)], 0)] == [
            0,
            0,
        ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: FullAttention(0), "block_tokens must be at least 1, got 0"),
        (lambda: SlidingWindow(16, window=0), "window must be at least 1, got 0"),
        (lambda: ChunkedLocal(16, chunk=-8), "chunk must be at least 1, got -8"),
        (lambda: needed(FullAttention(16), -1), "num_tokens must not be negative, got -1"),
        (lambda: needed(FullAttention(16), 1, computed_tokens=-2), "computed_tokens must not be"),
        (lambda: hit_alignment([]), "no groups given"),
        (lambda: hit_alignment([FullAttention(4)], hash_block_tokens=0), "hash_block_tokens"),
        (lambda: longest_hit([FullAttention(16)], [], 1), "0 slot masks for 1 groups"),
        (lambda: longest_hit([FullAttention(16)], [mask("#")], -1), "max_tokens must not be"),
        (lambda: longest_hit([FullAttention(16)], [mask("#")], 1, alignment=0), "alignment must"),
        (
            lambda: longest_hit([FullAttention(16)], [np.ones(3)], 1),  # type: ignore[list-item]
            r"group 0 must be a vector of booleans, got float64 of shape \(3,\)",
        ),
        (lambda: can_serve([FullAttention(16)], -1), "num_tokens must not be negative"),
    ],
)
def test_wrong_arguments_are_named(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        wrong()


def test_cost_for_8192_slots() -> None:
    """Next to a loop over as many slots in the same run; the best of 30 each, whatever pauses.

    Measured on a 2-core machine, CPython 3.11, numpy 2.4, 2026-11-15: full attention
    alone 4 µs; four kinds all present 50 µs; the worst case below 420 µs.
    """
    slots = 8192
    groups: list[Group] = [
        FullAttention(16),
        SlidingWindow(16, window=4096),
        ChunkedLocal(16, chunk=8192),
        RecurrentState(16),
    ]
    here, nowhere = np.ones(slots, dtype=np.bool_), np.zeros(slots, dtype=np.bool_)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(30):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    def cost(groups: list[Group], *present: BoolArray) -> float:
        return best(lambda: longest_hit(groups, present, slots * 16 - 1))

    loop = best(lambda: [slot for slot in range(slots) if not slot < 0])
    assert cost(groups[:1], here) < loop / 4
    assert cost(groups, *[here] * 4) < 3 * loop
    assert cost(groups, here, nowhere, nowhere, nowhere) < 16 * loop
