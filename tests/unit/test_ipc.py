"""Child processes: frames, orders and results, the engine's memory, starting and ending."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Batch, BatchId, Result, Way
from kvferry.tiers.disk import state
from kvferry.tiers.ipc.memory import EngineMemory, StatusPage, open_own_memory
from kvferry.tiers.ipc.messages import (
    Channel,
    FrameKind,
    frame,
    pack_order,
    pack_result,
    unpack_order,
    unpack_result,
)
from kvferry.tiers.ipc.process import ChildProcess, run_module
from kvferry.tiers.ipc.small_file import read_small, write_small

LONG = 60.0


@given(
    count=st.integers(1, 40),
    pieces=st.integers(1, 3),
    way=st.sampled_from([Way.READ, Way.WRITE]),
    number=st.integers(0, 2**62).map(BatchId),
    data=st.data(),
)
def test_orders_and_results_arrive_as_they_were_sent(
    count: int, pieces: int, way: Way, number: BatchId, data: st.DataObject
) -> None:
    rng = np.random.default_rng(number)
    order = Batch(
        number,
        way,
        Keys(rng.integers(0, 1 << 63, (count, 4), dtype=np.uint64)),
        12.5,
        rng.integers(0, 1 << 47, (count, pieces)),
        rng.integers(1, 1 << 20, pieces),
        rng.integers(0, 1 << 40, count) if count % 2 else None,
    )
    got, generation = unpack_order(pack_order(order, 3)[8:])
    assert (got.id, got.way, generation, got.deadline) == (number, way, 3, 12.5)
    assert got.keys == order.keys
    for name in ("places", "sizes", "addresses"):
        assert np.array_equal(getattr(got, name), getattr(order, name))
    bad = data.draw(st.dictionaries(st.integers(0, count - 1), st.text(max_size=20)))
    ok = np.ones(count, dtype=bool)
    ok[list(bad)] = False
    result = unpack_result(pack_result(Result(number, ok, bad, 77, 0.25))[8:])
    assert (result.batch_id, result.num_bytes, result.seconds) == (number, 77, 0.25)
    assert np.array_equal(result.ok, ok)
    assert dict(result.reasons) == bad


def test_frames_larger_than_the_sockets_room_arrive_whole_and_in_order() -> None:
    one, other = map(Channel, socket.socketpair())
    sent = [os.urandom(size) for size in (0, 1, 3_000_000, 10, 700_000)]
    for body in sent:
        one.send(frame(FrameKind.LOG, body))  # none of these waits
    got: list[bytes] = []
    while len(got) < len(sent):
        one.wait(0.0)
        other.wait(0.01)
        got += [body for _, body in other.receive()]
    assert got == sent
    one.end()
    other.wait(1.0)
    assert other.receive() == []
    assert other.is_ended
    one.close()
    other.close()
    one.send(b"to nobody")


@pytest.mark.parametrize("is_refused", [False, True])
def test_memory_that_cannot_be_reached_fails_alone(is_refused: bool) -> None:
    mem_fd = open_own_memory()
    memory = EngineMemory(os.getpid(), mem_fd)
    memory._is_refused = is_refused
    here, there = np.zeros((5, 64), np.uint8), np.zeros((5, 64), np.uint8)
    here[:] = np.random.default_rng().integers(0, 256, here.shape)
    addresses = there.ctypes.data + np.arange(5) * 64
    addresses[2] = 4096  # nobody has this page
    starts = here.ctypes.data + np.arange(5) * 64
    sizes = np.full(5, 64)
    assert memory.deliver(starts, addresses, sizes).tolist() == [True, True, False, True, True]
    assert (there[[0, 1, 3, 4]] == here[[0, 1, 3, 4]]).all()
    here[:] = 0
    assert memory.fetch(starts, addresses, sizes).tolist() == [True, True, False, True, True]
    assert (there[[0, 1, 3, 4]] == here[[0, 1, 3, 4]]).all()
    assert mem_fd is not None
    os.close(mem_fd)


def test_more_pieces_than_one_call_takes() -> None:
    memory = EngineMemory(os.getpid())
    here = np.random.default_rng().integers(0, 256, (3000, 7), dtype=np.uint8)
    there = np.zeros_like(here)
    starts = np.arange(3000) * 7
    ok = memory.deliver(
        here.ctypes.data + starts, there.ctypes.data + starts[::-1], np.full(3000, 7)
    )
    assert ok.all()
    assert (there == here[::-1]).all()


def test_a_channel_ends_with_its_peers_process_though_others_hold_its_socket() -> None:
    """And what the peer had sent before its death is received first."""
    ours, theirs = socket.socketpair()
    code = f"import socket; s = socket.socket(fileno={theirs.fileno()}); s.recv(1)"
    peer = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    channel = Channel(ours, peer.pid)
    try:
        theirs.sendall(frame(FrameKind.FORGET, b"last words"))
        channel.wait(LONG)
        assert channel.receive(0) == []
        peer.kill()
        peer.wait()
        assert channel.receive() == [(FrameKind.FORGET, b"last words")]
        assert channel.is_ended
    finally:
        peer.kill()
        channel.close()
        theirs.close()


def test_a_child_that_cannot_serve_says_why_and_is_gone() -> None:
    child = ChildProcess("kvferry.tiers.remote.process", b"no setup at all")
    try:
        end = time.monotonic() + LONG
        frames: list[tuple[FrameKind, bytes]] = []
        while not frames and time.monotonic() < end:
            child.channel.wait(1.0)
            frames = child.channel.receive()
        ((kind, reason),) = frames
        assert kind is FrameKind.REFUSED
        assert b"JSONDecodeError" in reason
        assert child.wait(LONG)
        assert child.ending == "ended with status 0"
        assert child.stop_memory_writes()
    finally:
        child.kill()
        child.close()


HANGS = """
import time
from pathlib import Path
from kvferry.tiers.ipc import child
from kvferry.tiers.ipc.messages import FrameKind, frame
def serve(engine):
    engine.channel.send(frame(FrameKind.READY))
    time.sleep(3600)
child.main(serve)
"""


def test_a_child_ends_with_its_engine_whatever_hangs_in_it() -> None:
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (ours, theirs), page = socket.socketpair(), StatusPage()
    fds = [theirs.fileno(), page.fd]
    child = subprocess.Popen(
        [sys.executable, "-c", HANGS, *map(str, [engine.pid, *fds, -1])], pass_fds=fds
    )
    channel = Channel(ours)
    try:
        channel.send(frame(FrameKind.HELLO))
        while not channel.receive():
            channel.wait(LONG)
        engine.kill()
        engine.communicate()
        assert child.wait(LONG) == 0
    finally:
        child.kill()
        child.wait()
        channel.close()
        theirs.close()
        page.close()


def test_a_small_file_is_replaced_and_read_by_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "small"
    assert read_small(path, LONG) == b""
    for data in (bytes(range(256)) * 40, b"another"):
        write_small(path, data, LONG)
        assert read_small(path, LONG) == data
        assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["small"]
    with pytest.raises(OSError, match="No such file"):
        write_small(tmp_path / "gone" / "small", b"data", LONG)
    pipe, linked = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    linked.symlink_to(path)
    assert read_small(pipe, LONG) == b"", "opening a pipe waits for its other end"
    with pytest.raises(OSError, match="symbolic link"):
        read_small(linked, LONG)


def test_who_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):
        def communicate(self, *told: object) -> tuple[bytes, bytes]:
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_module(state.MODULE, b"[]", 60)
    (child,) = started
    try:
        assert child.wait(60) == -signal.SIGKILL  # it waits for its input, which never comes
    finally:
        child.kill()
