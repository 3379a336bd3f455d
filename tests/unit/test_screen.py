"""The terminal's view at any width: every number whole, nothing beyond the edge, no label twice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.fakes.endpoint import stats

from kvferry.telemetry.source import Snapshot, exposition
from kvferry.tools.cli import explain as cli_explain
from kvferry.tools.cli.screen import Screen
from kvferry.tools.top.answers import (
    AnswerDecision,
    AnswerExplanation,
    Copied,
    Explained,
    Recent,
    RecentRequest,
)
from kvferry.tools.top.scrape import parse
from kvferry.tools.top.view import View, Watch


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


@pytest.mark.parametrize("width", [20, 24, 30, 40, 50, 60, 66, 67, 80, 100, 120, 149, 150, 200])
def test_every_number_is_whole_at_every_width(width):
    shown = lines(look(), width)
    assert max(map(cell_len, shown)) <= width
    words = re.sub(r"\s+", " ", " ".join(shown))
    for number in NUMBERS:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.]*\d)", words), number
    assert "…" not in words


def test_an_error_is_shown_with_the_last_view():
    shown = lines(look(), 40, error="it is gone \x1b[2J and that is a long story to tell")
    assert any("it is gone" in line for line in shown)
    assert "\x1b" not in "".join(shown)
    assert any("hit rate" in line for line in shown)


def test_names_with_markup_are_shown_as_they_are():
    tier = look().tiers[0]
    view = look(tiers=[replace(tier, name="[red]disk[/]")], misses={"[bold]": 3})
    for width in (30, 200):
        words = " ".join(lines(view, width))
        assert "[red]disk[/]" in words
        assert "[bold]" in words


@pytest.mark.parametrize("width", [30, 200])
def test_a_tier_that_is_away_is_seen_first_and_says_why(width):
    tier = replace(look().tiers[1], is_away=True, why_away="rank 1: \x1b[2J no such file")
    shown = lines(look(tiers=[look().tiers[0], tier]), width)
    words = re.sub(r"\s+", " ", " ".join(shown))
    assert "disk (away)" in words
    assert "Tier disk cannot be used: rank 1:" in words
    assert "no such file" in words
    assert "host (away)" not in words
    assert "\x1b" not in words


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_an_explanation_keeps_its_numbers_whole(width):
    decision = AnswerDecision("load_faster", 0.000257, 0.2438)
    why = AnswerExplanation(123_456, 0, 120_000, "evicted", 0, 120_000, decision)
    copies = tuple(
        Copied("host", "device", n, 589_800_000, 0.178, ("kernel", "staged"), "", "because")
        for n in (1, 12_345)
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
    for number in ("123456", "120000", "257 µs", "243.8 ms", "589.8 MB", "3.3 GB/s", "123,456"):
        assert number in words, number
    assert "…" not in words
    assert "1 blocks" not in words
    assert "Decision: load: expected to be faster, 257 µs to load" in words
