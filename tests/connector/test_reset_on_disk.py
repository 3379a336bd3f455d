"""A reset under vLLM and what is on disk: forgotten before the ranks hear of it, or not claimed."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.connector.test_tiers import CHAT_BLOCKS, chat, loaded, scheduler_of, settle, step
from tests.connector.test_tiers import make as make  # a fixture
from tests.fakes.sides import Sides

from kvferry.connectors.common import ranks as disk_marks
from kvferry.connectors.common.ranks import DiskMarks
from kvferry.tiers.disk.protocol import StoreAt

Make = Callable[..., Sides]


@pytest.fixture
def live(make: Make, tmp_path: Path) -> Callable[..., Sides]:
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
    for here, there in zip(found, wanted, strict=True):
        assert all((here[name] == there[name]).all() for name in here)


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
    sides.side.serving, sides.side._marks, sides.side._shapes = None, None, {}
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
        patch.setattr(disk_marks, "mark_apart", lambda stores, timeout: "No space left on device")
        assert not sides.side.reset()
    assert "No space left on device" in caplog.text
    assert sides.side.serving is not None, "it serves on"
    settle(sides)  # and the ranks hear of it all the same
    end(sides)
    assert restored(live()) == 0


def with_stores(sides: Sides, change: Callable[[int, StoreAt], StoreAt]) -> None:
    """As if stores were where the ranks say, seen from somewhere else."""
    shapes = [
        replace(
            shape,
            tiers=tuple(
                replace(tier, stores=tuple(change(shape.rank, store) for store in tier.stores))
                for tier in shape.tiers
            ),
        )
        for shape in sides.side._shapes.values()
    ]
    sides.side._marks = DiskMarks(shapes, 60.0)


def test_one_rank_in_reach_is_enough_and_the_others_forget_with_the_first_step(
    live: Callable[..., Sides],
) -> None:
    sides = live(2)
    chat(sides, 0)
    with_stores(sides, lambda rank, store: store._replace(store_id=bytes(16)) if rank else store)
    assert sides.side.reset()
    end(sides)
    sides = live(2)
    assert restored(sides) == 0
    plans = [sides.orders(None).plan]
    assert plans[0].forget == ("disk",), "what rank 1 still has must not come back either"


def test_a_drive_that_hangs_when_the_ranks_are_heard_delays_no_caller(
    live: Callable[..., Sides], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = live()
    os.mkfifo(tmp_path / "superblock")  # who opens it to read waits for a writer
    with monkeypatch.context() as patch:
        patch.setattr(disk_marks, "_START_SECONDS", -59.5)
        hearing = threading.Thread(
            target=with_stores,
            args=(sides, lambda rank, store: store._replace(folder=str(tmp_path))),
            daemon=True,
        )
        hearing.start()
        hearing.join(30)
    is_held = hearing.is_alive()
    if is_held:
        (tmp_path / "superblock").write_bytes(b"")
    assert not is_held
    assert not sides.side.reset(), "it may be here, and was not told"
