"""Traces as files, plain or gzipped; what is wrong is counted and named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.keys import KEY_WORDS
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.telemetry.traces import TraceReader, keys_of_numbers


def mooncake(at: float, ids: list[object], tokens: int | None = None, **more: object) -> str:
    tokens = tokens if tokens is not None else 512 * len(ids)
    line = {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids}
    return json.dumps({**line, **more})


def ours(at: float, ids: list[object], **more: object) -> str:
    return mooncake(at, ids, 16 * len(ids), **{"block_tokens": 16, **more})


def written(folder: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    text = "\n".join(lines)
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_mooncakes_lines(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake(5000, [0, 1, 2], 1100), mooncake(6500, []), "")
    first, second = TraceReader([path])
    assert (first.at, second.at) == (0.0, 1.5)
    assert first.numbers.tolist() == [0, 1, 2]
    assert (first.num_full, first.input_tokens) == (2, 1100)
    assert first.hints is None
    assert len(second.keys()) == 0
    assert TraceReader([path]).block_tokens == 512
    assert TraceReader([path], block_tokens=1024).block_tokens == 1024


def test_the_last_block_of_a_prompt_is_named_or_not(tmp_path: Path) -> None:
    lengths = [([1, 2], 1024), ([1, 2], 1025), ([1, 2], 1535), ([1, 2, 3], 1025), ([], 511)]
    path = written(tmp_path, *(mooncake(0, [*ids], tokens) for ids, tokens in lengths))
    reader = TraceReader([path])
    assert [each.num_full for each in reader] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.gz"])
def test_our_own_lines(tmp_path: Path, name: str) -> None:
    path = written(
        tmp_path,
        ours(100_000, [2**64 - 1, 5]),
        ours(101_000, [1], continues="30s", tenant="a"),
        ours(102_500, [9], ended=True),
        ours(102_500, [9], block_tokens=32),
        name=name,
    )
    reader = TraceReader([path])
    first, second, third = reader
    assert first.numbers.tolist() == [2**64 - 1, 5]
    assert first.num_full == 2
    assert second.hints == Hints(continues=True, within=30.0, tenant="a")
    assert third.hints == Hints(ended=True)
    assert third.at == 2.5
    assert reader.num_bad == 1
    assert "32 tokens, not 16" in reader.complaints[0]


def test_it_can_be_read_again_and_in_several_files(tmp_path: Path) -> None:
    paths = [written(tmp_path, mooncake(1000 * n, [n]), name=f"{n}") for n in range(3)]
    reader = TraceReader(paths[::-1])
    for _ in range(2):
        assert [each.at for each in reader] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "a JSON list, not an object"),
        ("[" * 100_000, "no JSON"),
        (mooncake(0, [1, 1]), "names a block twice"),
        (mooncake(0, [1, 2, 3], 1024), "3 blocks for 1024 tokens, which are 2 blocks of 512"),
        (mooncake(0, [1, 2], 100_000), "2 blocks for 100000 tokens, which are 196 blocks of 512"),
        (mooncake(0, [1, 2], 3 * 512), "2 blocks for 1536 tokens, which are 3 blocks of 512"),
        (mooncake(0, [], 512), "0 blocks for 512 tokens, which are 1 blocks of 512"),
        (mooncake(0, [-1]), "whole numbers from 0"),
        (mooncake(0, [1.5]), "whole numbers from 0"),
        (mooncake(0, [True]), "whole numbers from 0"),
        (mooncake(0, ["a"]), "whole numbers from 0"),
        (mooncake(0, [[1]]), "whole numbers from 0"),
        (mooncake(0, [2**64]), "whole numbers from 0"),
        (mooncake(0, [1], -5), "input_length must be a whole number from 0, got -5"),
        (mooncake(0, [1], timestamp=None), "timestamp must be a number, got None"),
        (mooncake(0, [1], timestamp=float("nan")), "timestamp must be a time"),
        (mooncake(0, [1], timestamp=1e300), "timestamp must be a time"),
        (mooncake(0, [1], hash_ids=3), "hash_ids must be a list of numbers, got 3"),
        ("x" * 40, "no JSON"),
    ],
)
def test_a_bad_line_is_left_out_counted_and_named(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path, mooncake(0, [1]), line, mooncake(1000, [2]))
    reader = TraceReader([path])
    assert [each.numbers.tolist() for each in reader] == [[1], [2]]
    assert reader.num_bad == 1
    (complaint,) = reader.complaints
    assert complaint.startswith("trace.jsonl, line 2: ")
    assert says in complaint
    assert len(complaint) < 300


def test_time_never_goes_back(tmp_path: Path) -> None:
    lines = [mooncake(at, [n]) for n, at in enumerate((1000, 3000, 2000, 3500))]
    reader = TraceReader([written(tmp_path, *lines)])
    assert [each.at for each in reader] == [0.0, 2.0, 2.0, 2.5]
    assert reader.num_late == 1


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvferry.telemetry.traces._MOST_LINE", 1000)
    path = written(tmp_path, mooncake(0, [1]), "7" * 5000, mooncake(0, [2]), "8" * 1500)
    reader = TraceReader([path])
    assert [each.numbers.tolist() for each in reader] == [[1], [2]]
    assert reader.complaints == [
        f"trace.jsonl, line {number}: longer than 1000 bytes" for number in (2, 4)
    ]


def test_a_file_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(mooncake(n, [n]) for n in range(5000)).encode())
    path = tmp_path / "cut.gz"
    path.write_bytes(whole[: len(whole) // 2])
    reader = TraceReader([path])
    assert 100 < len(list(reader)) < 5000
    assert "cut short or damaged" in reader.complaints[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("hello\n", "line 1: no JSON"),
        ('\n{"a": 1}\n', "line 2: no hash_ids"),
        (
            '{"hash_ids": [], "block_tokens": 0}',
            "block_tokens must be a whole number from 1",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        TraceReader([path])


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    paths = [
        written(tmp_path, mooncake(0, [1]), name="a"),
        written(tmp_path, ours(0, [1]), name="b"),
    ]
    with pytest.raises(InputError, match="blocks of 16 and 512 tokens"):
        TraceReader(paths)
    with pytest.raises(InputError, match="not the 512 you say"):
        TraceReader([paths[1]], block_tokens=512)
    with pytest.raises(InputError, match="cannot be read"):
        TraceReader([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="cannot be read"):
        TraceReader([tmp_path])
    with pytest.raises(InputError, match="no trace was named"):
        TraceReader([])


def test_numbers_make_keys() -> None:
    numbers = np.array([0, 1, 2, 2**64 - 1, 0], dtype=np.uint64)
    keys = keys_of_numbers(numbers)
    assert keys.array.shape == (5, KEY_WORDS)
    assert len({bytes(key) for key in keys}) == 4
    assert keys[0] == keys[4]
    many = keys_of_numbers(np.arange(20_000, dtype=np.uint64))
    for word in range(KEY_WORDS):  # every word tells them apart: the index looks at one of them
        assert len(np.unique(many.array[:, word])) == 20_000
