"""The library as a stranger uses it: what comes back is what went out, and misuse says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.errors import ClosedError, ConfigError, DeadlineError, InputError
from kvferry.scheduler.request import State
from kvferry.transfer.engine.cpu import Stream

BLOCKS, TOKENS = 12, 4
Tensors = list[np.ndarray[Any, Any]]


@pytest.fixture
def kv() -> Tensors:
    rng = np.random.default_rng()
    return [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(3)]


@pytest.fixture
def ferry(kv: Tensors) -> Iterator[kvferry.Ferry]:
    with kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB") as ferry:
        yield ferry


def copied(kv: Tensors, blocks: list[int]) -> Tensors:
    return [layer[blocks].copy() for layer in kv]


def poison(kv: Tensors) -> None:
    for layer in kv:
        layer[:] = 0xEE


def same(kv: Tensors, blocks: list[int], expected: Tensors) -> bool:
    return all(np.array_equal(a[blocks], b) for a, b in zip(kv, expected, strict=True))


def test_blocks_come_back_as_they_went(ferry: kvferry.Ferry, kv: Tensors) -> None:
    keys = ferry.keys(range(3 * TOKENS + 1))
    expected = copied(kv, [7, 0, 11])
    assert ferry.wait(ferry.store(keys, [7, 0, 11])).num_blocks == 3
    poison(kv)
    hit = ferry.match(keys)
    done = ferry.wait(ferry.load(hit, [1, 2, 3]))
    assert (done.ok, done.num_blocks) == (True, 3)
    assert same(kv, [1, 2, 3], expected)
    untouched = [0, *range(4, BLOCKS)]
    assert all((layer[untouched] == 0xEE).all() for layer in kv)


def test_reset_forgets_at_once_and_a_hit_from_before_is_gone(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(2 * TOKENS))
    ferry.wait(ferry.store(keys, [0, 1]))
    hit = ferry.match(keys)
    ferry.reset()
    assert len(ferry.match(keys)) == 0
    done = ferry.wait(ferry.load(hit, [2, 3]))
    assert (done.ok, done.num_blocks) == (False, 0)
    assert "gone" in done.reason


def test_released_and_loaded_hits_cannot_be_loaded(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(TOKENS))
    ferry.wait(ferry.store(keys, [0]))
    hit = ferry.match(keys)
    ferry.release(hit)
    assert not ferry.wait(ferry.load(hit, [1])).ok
    hit = ferry.match(keys)
    first, while_it_loads = ferry.load(hit, [1]), ferry.load(hit, [2])
    assert not ferry.wait(while_it_loads).ok
    assert ferry.wait(first, timeout=5).ok
    assert not ferry.wait(ferry.load(hit, [2])).ok


def test_a_failed_copy_is_a_failed_ticket_and_then_a_miss(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ferry.keys(range(2 * TOKENS))
    ferry.wait(ferry.store(keys, [0, 1]))
    engine: Any = ferry._rank.engine

    def broken(transfer: object) -> int:
        raise OSError("the link fell off")

    monkeypatch.setattr(engine, "_move", broken)
    done = ferry.wait(ferry.load(ferry.match(keys), [2, 3]))
    assert (done.ok, done.num_blocks) == (False, 0)
    assert "the link fell off" in done.reason
    assert not ferry.wait(ferry.store(ferry.keys(range(90, 90 + TOKENS)), [5])).ok
    monkeypatch.undo()
    assert len(ferry.match(keys)) == 0  # never offered again
    assert ferry.wait(ferry.store(keys, [0, 1])).num_blocks == 2
    assert ferry.wait(ferry.load(ferry.match(keys), [2, 3])).ok


def test_a_load_ends_only_when_nothing_writes_its_blocks(kv: Tensors) -> None:
    with kvferry.attach(
        kv, model="m", block_tokens=TOKENS, host="64KiB", load_deadline=0.01
    ) as ferry:
        keys = ferry.keys(range(TOKENS))
        ferry.wait(ferry.store(keys, [0]))
        hit = ferry.match(keys)
        go_on = threading.Event()
        engine: Any = ferry._rank.engine
        engine._loads.run(go_on.wait)
        ticket = ferry.load(hit, [1])
        with pytest.raises(DeadlineError):
            ferry.wait(ticket, timeout=0.1)
        assert ferry.stats().overdue == 1
        go_on.set()
        done = ferry.wait(ticket)
        assert "no answer in time" in done.reason
        assert len(ferry.match(keys)) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, k: f.match(k, on_device=4), "4 blocks on the device do not fit 3"),
        (lambda f, k: f.match(k, on_device=-1), "-1 blocks"),
        (lambda f, k: f.match(k + k[:1]), "are not distinct"),
        (lambda f, k: f.match([b"x"]), r"keys must come from ferry\.keys"),
        (lambda f, k: f.pin([b"x"]), r"keys must come from ferry\.keys"),
        (lambda f, k: f.pin(k, "soon"), "seconds"),
        (lambda f, k: f.store(k, [0, 1]), "2 device blocks from block 0 on do not fit 3"),
        (lambda f, k: f.store(k, [0], first=-2), "from block -2"),
        (lambda f, k: f.store(k, [0, 1, BLOCKS]), f"block {BLOCKS} does not exist"),
        (lambda f, k: f.store(k, [0, 1, -1]), "block -1 does not exist"),
        (lambda f, k: f.store(k, [5, 6, 5]), "device block 5 is given twice"),
        (lambda f, k: f.store(k, [5, 5], first=1), "device block 5 is given twice"),
        (lambda f, k: f.load(f.match(k), [0, 1]), "a hit of 3 blocks needs as many"),
        (lambda f, k: f.load(f.match(k), [0, 1, 1]), "device block 1 is given twice"),
        (lambda f, k: f.load(f.match(k), [0, 1, 99]), "block 99 does not exist"),
        (lambda f, k: f.explain("x"), r"a hit must come from ferry\.match"),
        (lambda f, k: f.wait(12345), "12345 is no ticket of this ferry"),
    ],
)
def test_misuse_is_said_and_loses_nothing(ferry: kvferry.Ferry, call: Any, words: str) -> None:
    keys = ferry.keys(range(3 * TOKENS))
    ferry.wait(ferry.store(keys, [0, 1, 2]))
    with pytest.raises(InputError, match=words):
        call(ferry, keys)
    assert all(request.state is State.MATCHED for request in ferry._scheduler.requests)
    assert ferry.wait(ferry.load(ferry.match(keys), [3, 4, 5])).num_blocks == 3
    ferry._scheduler.check_integrity()


def test_close_is_safe_twice_and_ends_all_use(kv: Tensors) -> None:
    ferry = kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB")
    keys = ferry.keys(range(TOKENS))
    hit = ferry.match(keys)
    ferry.store(keys, [0])
    ferry.close()
    ferry.close()
    for use in (
        lambda: ferry.match(keys),
        lambda: ferry.load(hit, []),
        lambda: ferry.release(hit),
        lambda: ferry.store(keys, [0]),
        ferry.poll,
        ferry.reset,
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_close_gives_everything_back_though_a_part_fails(
    kv: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = kvferry.Worker.close

    def broken(worker: kvferry.Worker) -> None:
        close(worker)
        raise RuntimeError("will not close")

    monkeypatch.setattr(kvferry.Worker, "close", broken)
    ferry = kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB")
    with pytest.raises(RuntimeError, match="will not close"):
        ferry.close()
    assert ferry._scheduler._closed
    with pytest.raises(ClosedError):
        _ = ferry._rank.host.tier.rows


def test_settings_that_cannot_be_used_are_refused(kv: Tensors) -> None:
    with pytest.raises(ConfigError, match="not both"):
        kvferry.attach(kv, model="m", config=kvferry.Config(), host="1GiB")
    with pytest.raises(ConfigError, match="host"):
        kvferry.attach(kv, model="m", block_tokens=TOKENS, host="100B")
    with pytest.raises(InputError):
        kvferry.attach([kv[0], kv[1][:5]], model="m", block_tokens=TOKENS)


# -- identity ------------------------------------------------------------------------------------


def test_the_dtype_of_every_tensor_counts() -> None:
    """Only the first one's did: layers of other dtypes shared their keys."""

    def keys_of(*dtypes: str) -> kvferry.Keys:
        kv = [np.zeros((BLOCKS, 16), dtype) for dtype in dtypes]
        with kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB") as ferry:
            return ferry.keys(range(TOKENS))

    kinds = [("f2", "f2"), ("f2", "i2"), ("i2", "f2"), ("i2", "i2"), ("f2", "u2"), ("f2", ">f2")]
    assert len({keys_of(*kind)[0] for kind in kinds}) == len(kinds)
    assert keys_of("f2", "i2") == keys_of("f2", "i2")


# -- why nothing was stored ----------------------------------------------------------------------


def test_a_store_says_why_it_kept_less(kv: Tensors) -> None:
    settings: dict[str, Any] = {"block_tokens": TOKENS, "host": f"{4 * 3 * 64}B"}
    with kvferry.attach(kv, model="m", **settings) as ferry:
        keys = ferry.keys(range(4 * TOKENS))

        def stored(keys: kvferry.Keys, blocks: list[int], first: int = 0) -> tuple[int, str]:
            done = ferry.wait(ferry.store(keys, blocks, first=first))
            assert done.ok
            return done.num_blocks, done.reason

        count, why = stored(keys, [2, 3], first=2)
        assert count == 0
        assert "block 0 is not stored" in why
        assert "from 2 on could never be found" in why
        assert stored(keys[:2], [0, 1]) == (2, "")
        assert stored(keys[:2], [0, 1]) == (0, "stored already")
        assert stored(keys[:0], []) == (0, "")
        assert stored(keys[:3], [0, 1, 2]) == (1, "")  # the others are kept: nothing is missing
        hit = ferry.match(keys)
        assert len(hit) == 3
        count, why = stored(ferry.keys(range(50, 50 + 3 * TOKENS)), [3, 4, 5])
        assert count == 1
        assert "from block 1 on: no slot can be freed" in why
        ferry.release(hit)


def test_a_store_says_that_it_was_held_back(kv: Tensors) -> None:
    settings: dict[str, Any] = {"block_tokens": TOKENS, "host": "64KiB"}
    with kvferry.attach(kv, model="m", max_bytes_in_flight=f"{2 * 3 * 64}B", **settings) as ferry:
        done = ferry.wait(ferry.store(ferry.keys(range(4 * TOKENS)), [0, 1, 2, 3]))
        assert (done.ok, done.num_blocks) == (True, 2)
        assert "from block 2 on: max_bytes_in_flight" in done.reason
    with kvferry.attach(kv, model="m", store_threshold=2, **settings) as ferry:
        keys = ferry.keys(range(TOKENS))
        done = ferry.wait(ferry.store(keys, [0]))
        assert (done.num_blocks, done.ok) == (0, True)
        assert "store_threshold = 2" in done.reason


# -- misspelt ------------------------------------------------------------------------------------


def test_a_misspelt_keyword_is_named(kv: Tensors) -> None:
    with pytest.raises(ConfigError, match="attach: there is no setting 'hosst'"):
        kvferry.attach(kv, model="m", hosst="1GiB")
    with pytest.raises(TypeError, match="model"):
        kvferry.attach(kv, modle="m")  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", [{"config": {}}, {"compute": "cuda:0"}])
def test_things_of_another_type_are_refused(kv: Tensors, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises((ConfigError, InputError), match=f"{name} must be"):
        kvferry.attach(kv, model="m", **wrong)


# -- ordering ------------------------------------------------------------------------------------


def test_compute_queued_after_a_load_sees_the_loaded_bytes(kv: Tensors) -> None:
    """The copy waits until compute has had all the time it needs to read too early."""
    compute = Stream("compute")
    try:
        with kvferry.attach(
            kv, model="m", block_tokens=TOKENS, host="64KiB", compute=compute
        ) as ferry:
            keys = ferry.keys(range(2 * TOKENS))
            expected = copied(kv, [0, 1])
            ferry.wait(ferry.store(keys, [0, 1]))
            poison(kv)
            engine: Any = ferry._rank.engine
            go_on = threading.Event()
            engine._loads.run(lambda: go_on.wait(10))
            seen: list[Tensors] = []
            ticket = ferry.load(ferry.match(keys), [5, 6])
            compute.run(lambda: seen.append(copied(kv, [5, 6])))
            was_early = compute.record().synchronize(0.2)  # time enough for one that does not wait
            go_on.set()
            assert ferry.wait(ticket).ok
            compute.synchronize()
            assert not was_early
            assert all(np.array_equal(a, b) for a, b in zip(seen[0], expected, strict=True))
    finally:
        compute.close()
