"""The rules of the source tree that no linter knows: `make check` runs them.

- at most 12 modules in the top folder and 15 in any other, no file over 800 lines;
- no import cycle, and no chain of imports longer than 16 modules;
- few docstrings and comments that say "who" or "nobody" where a noun belongs;
- no sentence of more than 25 words in log lines, settings and command help.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from functools import cache
from itertools import pairwise
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
MOST_MODULES_ON_TOP, MOST_MODULES = 12, 15
MOST_LINES, MOST_DEPTH, MOST_PRONOUNS, MOST_WORDS = 800, 16, 39, 25

PRONOUNS = re.compile(r"\b(who|whoever|whom|nobody|somebody|anybody)\b", re.IGNORECASE)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
SPEAKING_CALLS = {"option", "command", "argument", "group", "Setting"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of this package that a module imports when it is itself imported."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {each for each in found if each in known and each != name}


def check_folders(known: dict[str, Path]) -> list[str]:
    faults = []
    for folder in sorted({path.parent for path in known.values()}):
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        most = MOST_MODULES_ON_TOP if folder == SRC / "kvferry" else MOST_MODULES
        if count > most:
            faults.append(f"{folder.relative_to(SRC)} has {count} modules; at most {most}")
    for path in known.values():
        count = path.read_text().count("\n")
        if count > MOST_LINES:
            faults.append(f"{path.relative_to(SRC)} has {count} lines; at most {MOST_LINES}")
    return faults


def check_imports(known: dict[str, Path]) -> list[str]:
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    under_way: list[str] = []

    @cache
    def longest(name: str) -> tuple[str, ...]:
        if name in under_way:
            raise RecursionError(" -> ".join([*under_way[under_way.index(name) :], name]))
        under_way.append(name)
        below = max((longest(each) for each in sorted(graph[name])), key=len, default=())
        under_way.pop()
        return (name, *below)

    try:
        chain = max((longest(name) for name in graph), key=len)
    except RecursionError as cycle:
        return [f"import cycle: {cycle}"]
    if len(chain) > MOST_DEPTH:
        return [f"{len(chain)} modules import one another in a chain: " + " -> ".join(chain)]
    return []


def check_pronouns(known: dict[str, Path]) -> list[str]:
    places = []
    for path in known.values():
        text = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_text = token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
            )
            if is_text and PRONOUNS.search(token.string):
                places.append(f"{path.relative_to(SRC)}:{token.start[0]}")
    if len(places) > MOST_PRONOUNS:
        listed = " ".join(places[:20])
        return [f"{len(places)} docstrings and comments say who/nobody, as in {listed}"]
    return []


def spoken_texts(tree: ast.Module) -> list[tuple[int, str]]:
    """What people read of a module: log lines, and the help of settings and commands."""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            spoken = node.args[:1] if name in LOG_METHODS else []
            if name in SPEAKING_CALLS:
                spoken = [*node.args, *(k.value for k in node.keywords if k.arg == "help")]
            texts += [(each.lineno, text) for each in spoken if (text := constant_text(each))]
        elif isinstance(node, ast.ClassDef):  # the docstring of a setting is its help
            for row, words in pairwise(node.body):
                if isinstance(row, ast.AnnAssign) and isinstance(words, ast.Expr):
                    texts.append((words.lineno, constant_text(words.value)))
        elif isinstance(node, ast.FunctionDef) and any(
            getattr(getattr(each, "func", each), "attr", "") in {"command", "group"}
            for each in node.decorator_list
        ):
            texts.append((node.lineno, ast.get_docstring(node) or ""))
    return texts


def constant_text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def check_sentences(known: dict[str, Path]) -> list[str]:
    faults = []
    for path in known.values():
        for line, text in spoken_texts(ast.parse(path.read_text())):
            for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\x08", text):
                for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
                    words = re.findall(r"[^\s]*\w[^\s]*", sentence)
                    if len(words) > MOST_WORDS:
                        start = " ".join(words[:8])
                        faults.append(
                            f"{path.relative_to(SRC)}:{line}: {len(words)} words in one sentence: "
                            f"{start} ..."
                        )
    return faults


def main() -> int:
    known = modules()
    faults = [
        *check_folders(known),
        *check_imports(known),
        *check_pronouns(known),
        *check_sentences(known),
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
