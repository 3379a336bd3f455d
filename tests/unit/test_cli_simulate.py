"""``kvferry simulate`` as people use it: what it prints and refuses, and where it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.settings.eviction import POLICIES
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.cli.simulate import read_capacities, read_policies


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "<trace>.jsonl"
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 512 * 6,
            "output_length": 1,
            "hash_ids": [0, *range(100 * (n % 7) + 1, 100 * (n % 7) + 6)],
        }
        for n in range(70)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(kvferry, ["simulate", *map(str, arguments), "--jobs", "1"])


def test_json(trace: Path) -> None:
    done = run(trace, "--policy", "lru", "--capacity", "10,40", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    small, large = data["scores"]
    assert (small["policy"], small["capacity_blocks"]) == ("lru", [10])
    assert small["hit_ratio"] < large["hit_ratio"] == data["bound"][1]["hit_ratio"]
    assert data["num_requests"] == 70


def test_sizes_are_blocks_where_it_is_known_what_a_token_takes(trace: Path) -> None:
    done = run(
        trace, "--policy", "lru", "--token-bytes", "1KiB", "--capacity", "5MiB,10MiB", "--json"
    )
    assert [each["capacity_blocks"] for each in json.loads(done.stdout)["scores"]] == [[10], [20]]
    done = run(trace, "--capacity", "64GiB")
    assert done.exit_code == 1
    assert "--token-bytes" in done.output


def test_bad_lines_are_told(trace: Path) -> None:
    trace.write_text(trace.read_text() + "\nnonsense\n")
    done = run(trace, "--policy", "lru", "--capacity", "10")
    assert done.exit_code == 0
    assert "line 71: no JSON" in done.output
    assert "1 lines in all were left out" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "lur"], "did you mean 'lru'?"),
        (["--policy", "no_such_module_y:z"], "cannot be imported"),
        (["--policy", ","], "name at least one policy"),
        (["--capacity", ","], "name at least one"),
        (["--capacity", "0"], "must be at least 1"),
        (["--capacity", "3000+"], "--capacity"),
        (["--capacity", "99999999999"], "must be at most"),
        (["--block-tokens", "2048"], "which are 2 blocks of 2048"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    trace: Path, arguments: list[str], says: str
) -> None:
    done = run(trace, *arguments)
    assert done.exit_code in (1, 2)
    assert says in done.output
    assert "Traceback" not in done.output


def test_options() -> None:
    assert read_policies("all") == tuple(POLICIES)
    assert read_policies("arc, lru ,arc") == ("arc", "lru")
    assert read_capacities("3k, 100+2000,3000", None) == {(3000,): "3k", (100, 2000): "100+2000"}
