"""Check the prose of the pages: short sentences, plain words, links that lead somewhere.

A sentence has at most 25 words. A table cell, a list item and a heading are sentences of their own.
Inline code counts as one word; code blocks are not read. ``make check`` runs this program:

python tools/check_prose.py [PAGE ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25

WORDS = re.compile(r"\b(?:who|whoever|whom|nobody|somebody|anybody)\b", re.IGNORECASE)
PRIVATE = re.compile(
    r"\bissues? #?\d+|\b(?:agent|engineer|coding|work) sessions?\b"
    r"|(?<![\w./])/(?:work|home/\w+|tmp/bash_jobs)/",
    re.IGNORECASE,
)
FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)(?: [^)]*)?\)")
START = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>|:::.*)\s+")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*[\w`])")


def _blank(text: str) -> str:
    return "\n" * text.count("\n")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Every run of lines that is read as one, with the number of its first line."""
    text = FENCE.sub(lambda found: _blank(found[0]), text)
    text = re.sub(r"`[^`\n]+`", "code", text)
    text = COMMENT.sub(lambda found: _blank(found[0]), text)
    text = LINK.sub(lambda found: found[1], text)
    first, lines = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        cells = line.strip().startswith("|")
        if lines and (not line.strip() or START.match(line) or cells):
            yield first, " ".join(lines)
            lines = []
        if cells:
            yield from ((number, cell.strip()) for cell in line.strip().strip("|").split("|"))
        elif line.strip():
            first = first if lines else number
            lines.append(START.sub("", line).strip())


def slugs(page: Path) -> set[str]:
    """The anchors of a page, as the site and GitHub name its headings."""
    text = FENCE.sub("", page.read_text())
    found = set(re.findall(r"(?:id=\"|\{ ?#)([\w.-]+)", text))
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", LINK.sub(lambda link: link[1], heading)).strip().lower()
        found |= {re.sub(r"[-\s]+", "-", words), re.sub(r"\s", "-", words)}
    return found


def findings(page: Path) -> list[str]:
    """What is wrong with a page, each with its line."""
    text, found = page.read_text(), list[tuple[int, str]]()
    for number, paragraph in paragraphs(text):
        for sentence in SENTENCE_END.split(paragraph):
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > LONGEST:
                found.append((number, f"{count} words: {sentence[:60]}..."))
        found += [(number, f"use another word than {word!r}") for word in WORDS.findall(paragraph)]
    for match in PRIVATE.finditer(text):
        found.append((text.count("\n", 0, match.start()) + 1, f"means nothing here: {match[0]!r}"))
    prose = FENCE.sub(lambda block: _blank(block[0]), text)
    for match in LINK.finditer(prose):
        path, _, anchor = match[2].partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        generated = anchor.startswith("kvferry.")  # the API page's, made from docstrings
        if not target.exists() or (anchor and not generated and anchor not in slugs(target)):
            found.append((prose.count("\n", 0, match.start()) + 1, f"no such target: {match[2]}"))
    return [f"{page.relative_to(ROOT)}:{line}: {words}" for line, words in sorted(found)]


def main(names: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    patterns = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/benchmarks/*.md")
    pages = [Path(name).resolve() for name in names] or [
        page for pattern in patterns for page in sorted(ROOT.glob(pattern))
    ]
    found = [finding for page in pages for finding in findings(page)]
    print(*found, sep="\n" if found else "", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
