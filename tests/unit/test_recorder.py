"""Recordings: requests written beside the engine, as a trace that can be simulated."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

import kvferry
from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.hints import Hints
from kvferry.telemetry.recorder import RecordedRequest, Recorder, TraceFile
from kvferry.telemetry.traces import TraceReader, keys_of_numbers


def observed(numbers: list[int], at: float = 0.0, hints: Hints | None = None) -> RecordedRequest:
    chain = keys_of_numbers(np.array(numbers, dtype=np.uint64))
    return RecordedRequest(at, chain, 16 * len(numbers), hints)


def recorder_of(path: Path, **more: object) -> Recorder:
    settings = {"block_tokens": 16, "most_bytes": 1 << 20, "now": 0.0, **more}
    return Recorder(path, **settings)  # type: ignore[arg-type]


class Gate:
    """A file system that hangs until it is opened."""

    def __init__(self, recorder: Recorder) -> None:
        self.is_open, self.began = threading.Event(), threading.Event()
        self._write = recorder.file.write
        recorder.file.write = self.write  # type: ignore[method-assign]

    def write(self, line: Mapping[str, object]) -> None:
        self.began.set()
        assert self.is_open.wait(20)
        self._write(line)


def test_the_engine_never_waits_and_nothing_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_of(tmp_path / "trace.jsonl")
    gate, request = Gate(recorder), observed(list(range(16)))
    for _ in range(10_000):
        recorder.see(request)
    assert recorder.num_missed > 5000
    assert len(recorder._queue) <= 4096
    gate.is_open.set()
    recorder.close()
    assert "came faster than they could be recorded" in caplog.text


def test_a_recording_is_finished_though_close_did_not_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: a thread that was slow when the engine closed left a cut file and itself."""
    recorder = recorder_of(tmp_path / "trace.jsonl")
    gate = Gate(recorder)
    for number in range(3):
        recorder.see(observed(list(range(16 * number, 16 * number + 16))))
    assert recorder._thread is not None
    recorder.close()
    assert gate.began.is_set()
    assert recorder._thread.is_alive()
    assert "its recording ends later" in caplog.text
    gate.is_open.set()
    recorder._thread.join(20)
    assert not recorder._thread.is_alive()
    assert 1 <= len((tmp_path / "trace.jsonl").read_bytes().splitlines()) <= 3


def recorded(path: Path, *requests: RecordedRequest, **more: int) -> None:
    recorder = recorder_of(path, **more)
    for request in requests:
        recorder.see(request)
    recorder.close()


def test_a_recording_has_no_keys_of_ours_and_equal_ones_stay_equal(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    chain = list(range(100, 140))
    first = observed(chain, 1.0)
    second = observed(
        [*chain, *range(200, 216)], 2.0, Hints(continues=True, within=30.0, tenant="acme")
    )
    recorded(path, first, second)
    text = path.read_bytes()
    assert b"acme" not in text
    reader = TraceReader([path])
    assert reader.block_tokens == 128
    a, b = reader
    assert (a.input_tokens, a.num_full) == (640, 5)
    assert b.at == 1.0
    assert b.hints == Hints(continues=True, within=30.0)
    assert a.numbers.tolist() == b.numbers[:5].tolist()
    assert len(set(b.numbers.tolist())) == 7
    real = set(first.keys.array[:, 0].tolist()) | set(first.keys.array[:, 1].tolist())
    assert not real & set(a.numbers.tolist())
    recorded(tmp_path / "other.jsonl", observed(chain))
    (again,) = TraceReader([tmp_path / "other.jsonl"])
    assert not set(again.numbers.tolist()) & set(a.numbers.tolist()), "another secret"


def test_files_are_the_owners_alone_bounded_and_read_in_order(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "trace.jsonl"
        requests = [observed(list(range(n, n + 16)), float(n)) for n in range(0, 3200, 16)]
        recorded(path, *requests, most_bytes=12_000)
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files)
    assert sum(each.stat().st_size for each in files) < 14_000
    reader = TraceReader(files)
    times = [each.at for each in reader]
    assert reader.num_late == 0
    assert len(times) > 50
    assert times == sorted(times)


def test_an_earlier_recording_is_kept_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, observed(list(range(16))))
    one = TraceFile(path, 1 << 20)
    two = TraceFile(path, 1 << 20)
    assert (one.path.name, two.path.name) == ("trace.jsonl", "trace.jsonl-1")
    one.close()
    two.close()
    assert len(list(TraceReader([tmp_path / "trace.jsonl.1"]))) == 1


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "folder", tmp_path, link):
        with pytest.raises(ConfigError, match="record: cannot write"):
            TraceFile(path, 1 << 20)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="record: expected a whole path"):
        Config(record="trace.jsonl")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceFile(tmp_path / "trace.jsonl", 1 << 20)
    assert writer._file is not None
    os.close(writer._file.fileno())  # whatever is written now fails
    for _ in range(3):
        writer.write({"timestamp": 0, "hash_ids": []})
        writer.flush()
    writer.close()
    assert caplog.text.count("recording to") == 1


def test_close_ends_every_thread_and_the_recording(tmp_path: Path) -> None:
    path, before = tmp_path / "trace.jsonl", set(threading.enumerate())
    kv = [np.zeros((32, 2, 16, 2, 8), np.float32)]
    settings = {"host": "1MiB", "tiers": "memory:1MiB", "record": str(path)}
    with kvferry.attach(kv, model="m", block_tokens=16, **settings) as ferry:  # type: ignore[arg-type]
        url = ferry.serve_metrics(0)

        async def life() -> None:
            loop = asyncio.get_running_loop()
            for number in range(200):
                keys = ferry.keys(range(1000 * (number % 100), 1000 * (number % 100) + 160))
                ferry.release(ferry.match(keys))
                await ferry.store(keys, range(10))
            await loop.run_in_executor(None, lambda: urlopen(f"{url}metrics").read())

        asyncio.run(life())
    assert set(threading.enumerate()) <= before
    recorded = [request.numbers.tolist() for request in TraceReader([path])]
    assert recorded[:100] == recorded[100:]
    assert len(recorded) == 200
