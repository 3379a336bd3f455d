"""A reset under vLLM and what is on disk: forgotten before the ranks hear of it, or not claimed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.connector.test_restart import StubWeights
from tests.connector.test_restart import weights as weights  # fixtures
from tests.connector.test_tiers import CHAT_BLOCKS, chat, loaded, scheduler_of, settle, step
from tests.connector.test_tiers import make as make
from tests.fakes.disk_life import wait_until
from tests.fakes.sides import Sides, assert_same

from kvferry.connectors.common import ranks
from kvferry.tiers.disk.quota import StoreLock

Make = Callable[..., Sides]


@pytest.fixture
def live(make: Make, weights: StubWeights, tmp_path: Path) -> Callable[..., Sides]:
    def begin(num_ranks: int = 1, **options: Any) -> Sides:
        settings = {"tiers": "", "disk": str(tmp_path / "disk"), "disk_size": "16MiB"}
        return make(num_ranks, tier_write="through", **settings, **options)

    return begin


def end(sides: Sides) -> None:
    """As when a server dies, and worse: what the ranks still hold is written, no step is made."""
    for rank in sides.ranks:
        rank.close()
    sides.side.close()


def restored(sides: Sides) -> int:
    return int(scheduler_of(sides).stats().restored["disk"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_another_step_nothing_comes_back(
    live: Callable[..., Sides], num_ranks: int
) -> None:
    sides = live(num_ranks)
    chat(sides, 0)
    assert sides.side.reset()
    end(sides)
    sides = live(num_ranks)
    assert restored(sides) == 0
    wanted = chat(sides, 0)
    end(sides)
    sides = live(num_ranks)
    assert restored(sides) == CHAT_BLOCKS, "it was told once"
    num_blocks, found = loaded(sides, 0)
    assert num_blocks == CHAT_BLOCKS
    assert_same(found, wanted)


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_is_stored_after_a_reset_is_for_the_next_server_if_the_weights_are_its_own(
    live: Callable[..., Sides], weights: StubWeights, is_changed: bool
) -> None:
    sides = live(2)
    chat(sides, 0)
    weights.now += is_changed
    assert sides.side.reset()
    wanted = chat(sides, 1)
    settle(sides)
    assert scheduler_of(sides).stats().tiers["disk"].cached == CHAT_BLOCKS, "here it serves"
    end(sides)
    weights.now = 1
    sides = live(2)
    assert restored(sides) == (0 if is_changed else CHAT_BLOCKS)
    assert loaded(sides, 0)[0] == 0
    num_blocks, found = loaded(sides, 1)
    assert num_blocks == (0 if is_changed else CHAT_BLOCKS)
    if not is_changed:
        assert_same(found, wanted)


def test_what_was_ordered_before_and_is_written_after_does_not_come_back(
    live: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has its orders of the step before, and carries them out though the mark is there."""
    sides = live()
    ordered = []
    orders = sides.orders

    def keep(*args: Any, **options: Any) -> Any:
        ordered.append(orders(*args, **options))
        return ordered[-1]

    monkeypatch.setattr(sides, "orders", keep)
    chat(sides, 0)
    writes = [each for each in ordered if any(t.dst == "disk" for t in each.plan.transfers)]
    assert writes
    assert sides.side.reset()
    for each in writes:
        for rank in sides.ranks:
            rank.begin(pickle.loads(pickle.dumps(each)))
            rank.after_forward()
    end(sides)
    assert restored(live()) == 0


@pytest.mark.parametrize("state", ["out of service", "before the ranks were heard"])
def test_a_reset_out_of_service_is_one_too(live: Callable[..., Sides], state: str) -> None:
    sides = live()
    chat(sides, 0)
    if state == "out of service":
        sides.side._trip("test", RuntimeError("a mistake of ours"))
        assert sides.side.reset()
        end(sides)
        assert restored(live()) == 0
        return
    end(sides)
    sides = live()
    shapes = list(sides.side._shapes.values())
    sides.side.serving, sides.side._resets, sides.side._shapes = None, None, {}
    assert not sides.side.reset(), "nobody knows yet where the stores are"
    sides.side.meet_ranks(shapes)
    step(sides)
    assert scheduler_of(sides).stats().resets == 1
    assert loaded(sides, 0)[0] == 0


def test_a_mark_that_fails_is_not_claimed(
    live: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sides = live()
    chat(sides, 0)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "reset_in_child", lambda *told: "No space left on device")
        assert not sides.side.reset()
    assert "No space left on device" in caplog.text
    assert sides.side.serving is not None, "it serves on"
    settle(sides)  # and the ranks hear of it all the same
    end(sides)
    assert restored(live()) == 0


def test_one_rank_in_reach_is_enough_and_the_others_are_reset_with_the_first_step(
    live: Callable[..., Sides],
) -> None:
    sides = live(2)
    chat(sides, 0)
    resets = sides.side._resets
    assert resets is not None
    resets._stores[1] = resets._stores[1]._replace(host="another")
    assert sides.side.reset()
    end(sides)
    sides = live(2)
    assert restored(sides) == 0
    orders = sides.orders(None)
    assert orders.plan.forget == ("disk",), "what rank 1 still has must not come back either"
    for rank in sides.ranks:
        rank.begin(orders)
    chat(sides, 0)
    end(sides)
    assert restored(live(2)) == CHAT_BLOCKS, "the ranks have one number again"


def test_a_directory_that_is_not_open_cannot_be_reset(
    live: Callable[..., Sides], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat(sides := live(), 0)
    end(sides)
    (folder,) = (tmp_path / "disk").glob("kvferry-*")
    held = StoreLock.take(folder)
    sides = live(disk_start_deadline=0.2)
    assert not sides.side.reset()
    assert "it is not open, and cannot be reset" in caplog.text
    held.close()
    pool = scheduler_of(sides).lower.tiers[0].pool
    assert pool is not None

    def is_attached() -> bool:
        step(sides)
        return bool(pool.num_ready) and not scheduler_of(sides).lower.away

    wait_until(is_attached)
    assert restored(sides) == 0, "it was reset as it was opened"
    assert sides.side.reset()
    chat(sides, 0)
    end(sides)
    assert restored(live()) == CHAT_BLOCKS
