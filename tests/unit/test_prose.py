"""The prose check finds what it is for, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = " ".join(["word"] * 26)


@pytest.fixture
def check(tmp_path, monkeypatch):
    names = runpy.run_path(str(ROOT / "tools" / "check_prose.py"))
    monkeypatch.setitem(names["findings"].__globals__, "ROOT", tmp_path)

    def run(text: str) -> list[str]:
        page = tmp_path / "page.md"
        page.write_text(text)
        return names["findings"](page)

    return run


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        f"Short. {LONG}.",
        f"- {LONG}",
        f"| a | {LONG} |",
        "\n".join(["one two three four five six seven"] * 4),
        "It goes to whoever reads it.",
        "See issue 12.",
        "It lies in /work/main.",
        "[text](missing.md)",
        "[text](#missing)",
    ],
)
def test_a_fault_is_found_once(check, text):
    assert len(check(f"# Title\n\n{text}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["word"] * 25),
        f"`{LONG}`",
        f"```\n{LONG} whoever\n```",
        f"<!-- {LONG} -->",
        f"[text](https://example.org/{LONG.replace(' ', '-')})",
        "| " + " | ".join(["four words stand here"] * 8) + " |",
        "- six words in every list item\n" * 6,
        f"{LONG[:60]} 0.26.0 words. {LONG[:60]}",
        "[text](page.md#the-title-of-it) [text](#the-title-of-it)",
        "The workplace, and an issue tracker.",
    ],
)
def test_what_is_allowed(check, text):
    assert check(f"# The title: of `it`\n\n{text}\n") == []


def test_a_line_is_named(check):
    (found,) = check(f"# Title\n\n```\ncode\n```\n\nFine.\n\n{LONG}\n")
    assert found.startswith("page.md:9: 26 words")
