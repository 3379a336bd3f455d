"""The terminal's view at any width: every number whole, nothing beyond the edge, no label twice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.fakes.endpoint import stats

from kvferry.telemetry.catalog import Snapshot, exposition
from kvferry.tools.cli import explain as cli_explain
from kvferry.tools.cli.top import Screen
from kvferry.tools.top.scrape import (
    AnswerDecision,
    AnswerExplanation,
    Copied,
    Explained,
    Recent,
    RecentRequest,
    parse,
)
from kvferry.tools.top.view import DrivesView, View, Watch


def look(**changes: object) -> View:
    snapshot = Snapshot(
        stats(queries=1_234_567, moved=90), "0.1.0", {"host": 1_000_000}, pinned_bytes=24 << 30
    )
    text = exposition(snapshot).decode()
    looks = [parse(text, at=second) for second in (0.0, 1.0)]
    watch = Watch(
        "http://127.0.0.1:9475", look=lambda url: looks.pop(0), explain=lambda url: {"requests": []}
    )
    watch.look()
    return replace(watch.look(), **changes)  # type: ignore[arg-type]


def lines(view: View, width: int, error: str = "") -> list[str]:
    console = Console(width=width, force_terminal=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(Screen(view, error))
    return capture.get().splitlines()


NUMBERS = (
    *("1,234,567", "700 of 1,000", "6,000 of 10,000", "3,703,701", "6,172,835", "700.0 MB"),
    *("4.5 GB", "9.0 GB", "50.0 GB/s", "123.0 MB", "20,000", "25.8 GB", "42"),
)


@pytest.mark.parametrize("width", [90, 150])
def test_every_number_is_whole(width):
    shown = lines(look(), width)
    assert max(map(cell_len, shown)) <= width
    words = re.sub(r"\s+", " ", " ".join(shown))
    for number in NUMBERS:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.]*\d)", words), number
    assert "…" not in words


HOST, DISK = look().tiers
AWAY = replace(DISK, is_away=True, why_away="rank 1: \x1b[2J no such file")
KEYED = replace(HOST, name="store", free=0, cached=0, leased=0, asked=4000, found=999)
DRIVES = DrivesView(3.5e9, 1.2e9, {"damaged": 2, "late": 1}, 5, 0.4, 1)
WELL = replace(DRIVES, failed={}, num_away=0, pending=0)


@pytest.mark.parametrize("width", [90, 200])
@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        ({"idle": "prefix caching is off"}, ["idle: prefix caching is off"], []),
        ({"idle": "a newer \x1b[2J one"}, ["idle: a newer"], []),
        ({"tiers": [replace(HOST, name="[red]disk[/]")]}, ["[red]disk[/]"], []),
        ({"misses": {"[bold]": 3}}, ["3 [bold]"], []),
        (
            {"tiers": [HOST, AWAY]},
            ["disk (unavailable)", "Tier disk is unavailable: rank 1:", "no such file"],
            ["host (unavailable)"],
        ),
        ({"tiers": [KEYED]}, ["999 of 4,000 found", "25%"], ["0 of 0"]),
        (
            {"tiers": [replace(DISK, drives=DRIVES, restored=1200)]},
            [
                "Drives of disk: 3.5 GB/s read, 1.2 GB/s written, 5 blocks not durable yet "
                "(oldest 0.4 s), 1,200 blocks found at start",
                "2 blocks failed (damaged), 1 block failed (late), 1 drive unavailable",
            ],
            [],
        ),
        ({"tiers": [replace(DISK, drives=WELL)]}, ["0 blocks not durable yet"], ["failed ("]),
    ],
)
def test_it_says_what_is_special(width, changes, words, absent):
    shown = lines(look(**changes), width, error="gone \x1b[2J, a long story to tell")
    assert max(map(cell_len, shown)) <= width
    said = re.sub(r"\s+", " ", " ".join(shown))
    assert "\x1b" not in said
    assert [each for each in ("gone", "hit rate", *words) if each not in said] == []
    assert [each for each in absent if each in said] == []


@pytest.mark.parametrize("width", [80, 200])
def test_an_explanation_keeps_its_numbers_whole(width):
    decision = AnswerDecision("load_faster", 0.000257, 0.2438)
    why = AnswerExplanation(123_456, 0, 120_000, "evicted", 0, 120_000, decision)
    copies = tuple(
        Copied("host", "device", n, 589_800_000, 0.178, ("kernel", "staged")) for n in (1, 12_345)
    )
    explained = Explained("chatcmpl-" + "0123456789" * 5, why, (), copies)
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        cli_explain.put_explained(explained, console)
        row = RecentRequest("conversation-004-turn-01", "never_stored", 123_456, 7)
        cli_explain.put_recent(Recent((row,)), console)
    shown = capture.get().splitlines()
    assert max(map(cell_len, shown)) <= width
    words = re.sub(r"\s+", " ", " ".join(shown))
    for number in ("123,456", "120,000", "257 µs", "243.8 ms", "589.8 MB", "3.3 GB/s", "12,345"):
        assert number in words, number
    assert "…" not in words
    assert "1 blocks" not in words
    assert "Decision: load (expected to be faster): 257 µs to load, 243.8 ms to compute" in words


def test_an_explanation_says_what_tiers_were_asked_for_and_which_were_away():
    away = ("disk: rank 0: \x1b[2J gone",)
    why = AnswerExplanation(100, 0, 0, "tier_unavailable", asked_blocks=1, tiers_away=away)
    console = Console(width=200, highlight=False, color_system=None)
    with console.capture() as capture:
        cli_explain.put_explained(Explained("r", why), console)
    assert "It was on a tier that was unavailable." in capture.get()
    assert "Lower tiers were asked for 1 block." in capture.get()
    assert "Unavailable: disk: rank 0:" in capture.get()
    assert "\x1b" not in capture.get()
