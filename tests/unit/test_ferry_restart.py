"""A ferry over a tier that outlives it: the next one finds what was kept, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.fakes import lasting
from tests.unit.test_ferry_tiers import (
    CHAT_BLOCKS,
    CHATS,
    HOST_BLOCKS,
    SLOT,
    TOKENS,
    Open,
    attach,
    chat,
    content,
    fill,
)

import kvferry
from kvferry.cache.slots import as_slots
from kvferry.errors import ClosedError
from kvferry.tiers.contract import Result, Way
from kvferry.tiers.queued import Task
from kvferry.types import TierName

__all__ = ["attach"]  # a fixture

SHELF = "shelf=tests.fakes.lasting:open_shelf:here/200"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    lasting.shelves.clear()
    yield
    lasting.shelves.clear()


def find(ferry: kvferry.Ferry, number: int) -> tuple[int, bytes]:
    """Load what there is of a conversation; how many blocks, and their bytes."""
    hit = ferry.await_hit(ferry.match(chat(ferry, number)), 10)
    blocks = list(range(70, 70 + len(hit)))
    for tensor in ferry.kv:  # type: ignore[attr-defined]
        tensor[70:] = 0xEE
    done = ferry.wait(ferry.load(hit, blocks), 10)
    assert done.ok
    return len(hit), content(ferry, blocks)


@pytest.mark.parametrize("write", ["spill", "through"])
def test_the_next_life_is_warm(attach: Open, write: str) -> None:
    first = attach(SHELF, tier_write=write)
    wanted = fill(first)
    first.close()
    second = attach(SHELF, tier_write=write)
    assert second.stats().tiers["shelf"].cached == CHATS * CHAT_BLOCKS
    for number in range(CHATS):
        assert find(second, number) == (CHAT_BLOCKS, wanted[number])
    second._scheduler.check_integrity()


def test_after_a_reset_nothing_is_written_out(attach: Open) -> None:
    first = attach(SHELF)
    first.reset()
    first.wait(first.store(chat(first, 0), list(range(CHAT_BLOCKS))))
    first.close()
    assert not lasting.shelves["here", 0], "no other life would ask for it"


def test_an_interrupt_ends_the_writing_and_closes(
    attach: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attach(SHELF)
    first.wait(first.store(chat(first, 0), list(range(CHAT_BLOCKS))))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvferry.ferry.pause", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.close()
    with pytest.raises(ClosedError):
        first.match(chat(first, 0))


def test_a_tier_that_takes_nothing_does_not_keep_us(
    attach: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = attach(SHELF, tier_flush="10min", host=f"{4 * HOST_BLOCKS * SLOT}B")
    fill(first)

    def fail(self: lasting.ShelfTier, task: object) -> None:
        raise OSError("the shelf is full")

    monkeypatch.setattr(lasting.ShelfTier, "_carry_out", fail)
    caplog.set_level("INFO", "kvferry")
    first.close()  # long before the ten minutes are over
    assert "48 blocks that only host memory holds are not written" in caplog.text
    assert not lasting.shelves["here", 0]


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No read of a shelf ends before the test does."""
    end = threading.Event()
    carry_out = lasting.ShelfTier._carry_out
    threads: list[threading.Thread] = []

    def hang(self: lasting.ShelfTier, task: Task) -> Result:
        if task.batch.way is Way.READ:
            threads.append(threading.current_thread())
            end.wait()
        return carry_out(self, task)

    monkeypatch.setattr(lasting.ShelfTier, "_carry_out", hang)
    kept: list[object] = []
    monkeypatch.setattr("kvferry.tiers.movers._abandoned_memory", kept)
    yield
    end.set()
    for thread in threads:  # they touch the memory, which is given back after this
        thread.join()
    kept.clear()


def hang(ferry: kvferry.Ferry) -> None:
    """Have a read begin that never ends; nobody waits long for it once all else is closed."""
    ferry._rank.tiers[TierName("shelf")]._close_seconds = 0.05
    assert ferry.match(chat(ferry, 0)).is_pending
    ferry.poll()


@pytest.mark.usefixtures("hung")
def test_beside_a_read_that_hangs_all_is_written_out(attach: Open) -> None:
    first = attach(SHELF)
    fill(first)
    first.close()
    before = len(lasting.shelves["here", 0])
    second = attach(SHELF, promote_deadline="10min", tier_flush="10min")
    hang(second)
    second.store(chat(second, 50), list(range(CHAT_BLOCKS)))
    second.close()
    assert len(lasting.shelves["here", 0]) == before + CHAT_BLOCKS


def test_a_reset_is_not_undone_by_a_restart(attach: Open) -> None:
    first = attach(SHELF, tier_write="through")
    fill(first)
    first.reset()
    later = chat(first, 50)
    first.wait(first.store(later, list(range(CHAT_BLOCKS))))
    first.close()
    assert lasting.shelves["here", 0], "what came after the reset is on the shelf"
    second = attach(SHELF, tier_write="through")
    assert [find(second, number)[0] for number in (*range(CHATS), 50)] == [0] * (CHATS + 1)


def test_a_tier_that_cannot_say_what_it_has_begins_empty(
    attach: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attach(SHELF, tier_write="through").close()

    def fail(self: lasting.ShelfTier) -> None:
        raise OSError("the shelf is on fire")

    monkeypatch.setattr(lasting.ShelfTier, "recovered", fail)
    ferry = attach(SHELF, tier_write="through")
    assert "on fire" in caplog.text
    assert find(ferry, 0)[0] == 0
    monkeypatch.setattr(
        lasting.ShelfTier, "recovered", lambda self: (chat(ferry, 1), as_slots([1]))
    )
    assert attach(SHELF).stats().tiers["shelf"].cached == 0
    assert "begins empty" in caplog.text


def test_a_tier_that_cannot_forget_serves_nothing_of_before_in_any_later_life(
    attach: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch alone keeps what was stored after one life's reset from another's."""
    monkeypatch.setattr(lasting.ShelfTier, "forget", lambda self: None)
    first = attach(SHELF, tier_write="through")
    first.reset()
    fill(first)
    first.close()
    second = attach(SHELF, tier_write="through")
    second.reset()
    assert second.stats().restored["shelf"] == CHATS * CHAT_BLOCKS
    assert [find(second, number)[0] for number in range(CHATS)] == [0] * CHATS


def test_a_hit_from_a_lower_tier_is_told_apart_until_the_next_request(attach: Open) -> None:
    first = attach(SHELF)
    fill(first)
    first.close()
    second, tokens = attach(SHELF), CHAT_BLOCKS * TOKENS
    told, num_copied = [], []
    for number, is_prefetched in ((0, False), (0, False), (1, True)):
        if is_prefetched:
            second.prefetch(chat(second, number))
        hit = second.await_hit(second.match(chat(second, number)), 10)
        assert second.wait(second.load(hit, list(range(CHAT_BLOCKS))), 10).ok
        entry = second._scheduler.journal(hit.request.id)
        assert entry is not None
        assert entry.explanation is not None
        told.append(entry.explanation.as_dict()["tier_hit_tokens"])
        copies = [copy for copy in entry.copies if copy.src == "shelf"]
        assert all(copy.seconds >= 0 for copy in copies)
        num_copied.append(sum(copy.num_blocks for copy in copies))
    shelf, host = {"device": 0, "host": 0, "shelf": tokens}, {"device": 0, "host": tokens}
    assert told == [shelf, host, shelf]
    assert num_copied[:2] == [CHAT_BLOCKS, 0]
    by_tier = second.stats().tier_hit_tokens
    assert by_tier == {"device": 0, "host": tokens, "shelf": 2 * tokens}
    assert sum(by_tier.values()) == second.stats().hit_tokens
