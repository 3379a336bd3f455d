"""The terminal's view: every number whole, nothing beyond the edge, no label twice."""

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
from kvferry.tools.top.scrape import parse
from kvferry.tools.top.view import TenantView, View, Watch


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


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
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
            {"tiers": [replace(DISK, pending=5, failed={"damaged": 2, "late": 1}, held=4)]},
            [
                "Drives of disk: 2 blocks failed (damaged), 1 block failed (late)",
                "Tier disk: 4 blocks pinned, 5 blocks not durable yet",
            ],
            [],
        ),
        (
            {"tenants": [TenantView("search", {"host": 4}, 1, 2, 0.5)]},
            ["Tenant Slots Evicted Requests Device misses loaded search host 4 1 2 50%"],
            [],
        ),
    ],
)
def test_it_says_what_is_special(changes, words, absent):
    shown = lines(look(**changes), 90, error="gone \x1b[2J, a long story to tell")
    assert max(map(cell_len, shown)) <= 90
    said = re.sub(r"\s+", " ", " ".join(shown))
    assert "\x1b" not in said
    assert [each for each in ("gone", "hit rate", *words) if each not in said] == []
    assert [each for each in absent if each in said] == []


def explained(**changes: object) -> str:
    why = {
        "asked_tokens": 123_456,
        "tier_hit_tokens": {"device": 0, "host": 120_000},
        "reason": "evicted",
        "first_missing": 120_000,
        **changes,
    }
    copy = {"src": "host", "dst": "device", "num_blocks": 12_345, "num_bytes": 589_800_000}
    copy |= {"seconds": 0.178, "paths": ["kernel", "staged"]}
    console = Console(width=200, highlight=False, color_system=None)
    with console.capture() as capture:
        answer = {"request_id": "chatcmpl-0", "explanation": why, "copies": [copy]}
        cli_explain.print_explanation(answer, console)
    return capture.get()


def test_an_explanation_has_its_numbers():
    load = {"verdict": "load_faster", "load_seconds": 0.000257, "compute_seconds": 0.2438}
    words = explained(decision=load)
    for number in ("123,456", "120,000", "589.8 MB", "3.3 GB/s", "12,345"):
        assert number in words, number
    assert "Decision: load (expected to be faster): 257 µs to load, 243.8 ms to compute" in words


def test_an_explanation_says_what_tiers_were_asked_for_and_which_were_away():
    away = ["disk: rank 0: \x1b[2J gone"]
    words = explained(reason="tier_unavailable", asked_blocks=1, tiers_away=away)
    assert "It was on a tier that was unavailable." in words
    assert "Lower tiers were asked for 1 block." in words
    assert "Unavailable: disk: rank 0:" in words
    assert "\x1b" not in words
