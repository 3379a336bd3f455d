"""The documents say what the code does: examples and settings in them are the real ones."""

import ast
import inspect
import re
import runpy
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry.config import describe
from kvferry.engine import EngineBlocks
from kvferry.ferry import Ferry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvferry"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def settings_page() -> str:
    """docs/SETTINGS.md as it should be; write it anew with ``python -m tests.unit.test_docs``."""

    def table(*, basic: bool) -> list[str]:
        return [
            "| setting | accepts | default | what it does |",
            "|---|---|---|---|",
            *(
                f"| `{s.name}` | {s.accepts.replace('|', ', ')} | {s.default} | {s.help} |"
                for s in describe()
                if s.basic is basic
            ),
            "",
        ]

    return "\n".join(
        [
            "# Settings",
            "",
            "Give settings as keywords of `kvferry.attach`, as environment variables (`KVFERRY_` "
            "and the name in capitals), or in a file. `KVFERRY_CONFIG` names the file: TOML or "
            "JSON, with or without a table `kvferry`. Keywords win over the environment, the "
            "environment over the file.",
            "",
            "## Basic",
            "",
            *table(basic=True),
            "## Advanced",
            "",
            *table(basic=False),
        ]
    )


def test_settings_page_is_current() -> None:
    assert (ROOT / "docs" / "SETTINGS.md").read_text() == settings_page()


def test_readme_shows_the_library_example_as_it_stands() -> None:
    program = (ROOT / "examples" / "library.py").read_text().split('"""', 2)[2].strip()
    assert program in (ROOT / "README.md").read_text()


def test_the_plots_show_the_data() -> None:
    """``python tools/plots.py`` draws them."""
    for name, drawn in runpy.run_path(str(ROOT / "tools" / "plots.py"))["plots"]().items():
        assert (ROOT / "docs" / "benchmarks" / name).read_text() == drawn, name


def test_the_pages_pass_the_prose_check(capsys) -> None:
    failed = runpy.run_path(str(ROOT / "tools" / "check_prose.py"))["main"]([])
    assert not failed, capsys.readouterr().out


def test_the_package_indexs_page_links_to_nothing_that_is_not_there() -> None:
    """It has no files beside it: of a link into the source tree only the words may remain."""
    page = (ROOT / "README.md").read_text()
    (rule,) = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    shown = re.sub(rule["pattern"], rule["replacement"], page)
    assert "](docs/" in page
    assert [link for link in re.findall(r"\]\(([^)]*)\)", shown) if "://" not in link] == []
    assert "Start with the quick start;" in shown


def test_the_source_archive_has_all_that_git_has() -> None:
    """So that it can be built, tested and read from; but for what only a checkout needs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    kept = {line.split("/")[0] for line in listed.stdout.splitlines()}
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    by_itself = {"pyproject.toml", "LICENSE", ".gitignore"}
    assert kept - {name.lstrip("/") for name in included} - by_itself == {
        ".ci",
        ".github",
        ".pre-commit-config.yaml",
    }


def test_the_structure_page_is_short_and_names_what_exists() -> None:
    page = (ROOT / "docs" / "STRUCTURE.md").read_text()
    assert page.count("\n") <= 150
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", page):
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert f"`{folder.name}/" in page, folder.name


def test_the_drawing_has_the_packages_in_the_order_of_imports() -> None:
    """Every layer of the import contract, from the top to the bottom."""
    (contract,) = (
        each
        for each in PROJECT["tool"]["importlinter"]["contracts"]
        if each["name"] == "Imports point down"
    )
    drawing = (ROOT / "docs" / "STRUCTURE.md").read_text().split("```\n")[1]
    names = "\n".join(re.split(r"\s{2,}", line)[0] for line in drawing.splitlines())
    places = [
        [re.search(rf"\b{name}\b", names).start() for name in re.findall(r"\w+", layer)]  # type: ignore[union-attr]
        for layer in contract["layers"]
    ]
    for above, below in pairwise(places):
        assert max(above) < min(below)


EXCERPT = re.compile(
    r"<!-- (examples/\w+\.py): ([\w.]+) -->\n(?:\n```python\n.*?```\n)?", re.DOTALL
)


def with_excerpts(page: str) -> str:
    """A page with the code under each ``<!-- FILE: Class.method -->`` as it stands in the file."""
    return EXCERPT.sub(
        lambda found: (
            f"{found[0].splitlines()[0]}\n\n```python\n{_source(found[1], found[2])}\n```\n"
        ),
        page,
    )


def _source(file: str, name: str) -> str:
    text = (ROOT / file).read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(
            each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part
        )
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def test_the_guide_shows_its_example_as_it_stands() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    assert len(EXCERPT.findall(page)) == page.count("```python\n") >= 10
    assert page == with_excerpts(page)


def test_the_guide_shows_every_part_of_what_an_engine_answers() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    members = [name for name in vars(EngineBlocks) if not name.startswith("_")]
    assert len(members) == 5
    for name in (*members, "kf.Namespace", "policy_named"):
        assert name in page, name


METHODS = re.compile(r"(<!-- Ferry's methods -->\n)(?:\n\|.*?\n(?=\n))?", re.DOTALL)


def with_methods(page: str) -> str:
    """A reference page with what Ferry's public methods do, in their own first sentences."""
    rows = ["| method | what it does |", "|---|---|"]
    for name, method in vars(Ferry).items():
        if not name.startswith("_"):
            words = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
            first = re.split(r"(?<=[.])\s|; ", words)[0].rstrip(".").replace("``", "`")
            first = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", first)
            rows.append(f"| [`{name}`](#kvferry.Ferry.{name}) | {first}. |")
    return METHODS.sub(lambda found: found[1] + "\n" + "\n".join(rows) + "\n", page)


def test_the_reference_lists_every_method_of_a_ferry() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == with_methods(page)
    listed = re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)
    assert set(listed) == {name for name in dir(Ferry) if not name.startswith("_")}


OTHERS = re.compile(r"(<!-- the other settings -->\n)(?:\nAll other .*\n\n.*\n)?")


def with_other_settings(page: str) -> str:
    """The page on vLLM with the settings that it says nothing of its own about."""
    rest = OTHERS.sub("", page)
    names = [f"`{each.name}`" for each in describe() if f"`{each.name}`" not in rest]
    words = "All other [settings](SETTINGS.md) mean the same as everywhere:"
    return OTHERS.sub(lambda found: f"{found[1]}\n{words}\n\n{', '.join(names)}.\n", page)


def test_the_vllm_page_names_every_setting() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert page == with_other_settings(page)
    assert not [each.name for each in describe() if f"`{each.name}`" not in page]


def write_anew() -> None:
    guide, reference, vllm = (ROOT / "docs" / f"{name}.md" for name in ("engine", "api", "vllm"))
    vllm.write_text(with_other_settings(vllm.read_text()))
    guide.write_text(with_excerpts(guide.read_text()))
    reference.write_text(with_methods(reference.read_text()))
    (ROOT / "docs" / "SETTINGS.md").write_text(settings_page())


if __name__ == "__main__":
    write_anew()
