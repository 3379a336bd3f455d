"""The pages people copy from: their commands, programs and names are the real ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from kvferry.config import DISK_KEY_ENV, REMOTE_KEY_ENV, describe
from kvferry.scheduler.journal import Reason
from kvferry.settings.eviction import POLICIES
from kvferry.settings.tiers import STORE_KINDS
from kvferry.telemetry.catalog import catalog
from kvferry.telemetry.endpoint import ACTIONS
from kvferry.tools.cli.commands import kvferry as cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OURS = (
    "quickstart",
    "cli",
    "operations",
    "tuning",
    "troubleshooting",
    "comparison",
    "lineage",
    "migration",
)


@pytest.fixture(params=OURS)
def text(request) -> str:
    return (DOCS / f"{request.param}.md").read_text()


def test_the_library_program_runs(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.S)
    exec(compile(program, "quickstart.md", "exec"), {})
    assert capsys.readouterr().out == "6 True Reason.NOTHING_MISSED\n"


def test_the_help_shown_is_the_help():
    shown = (DOCS / "cli.md").read_text().split()
    real = CliRunner().invoke(cli, ["--help"], prog_name="kvferry").output.split()
    assert " ".join(real) in " ".join(shown)  # however wide the terminal was


def test_metrics_named_exist(text):
    known = {metric.name for metric in catalog()}
    named = set(re.findall(r"\bkvferry_[a-z_]+[a-z]", text))
    assert named <= known, named - known


def test_settings_named_exist(text):
    known = {setting.name for setting in describe()}
    named = set(re.findall(r"`(\w+) = ", text))
    assert named <= known, named - known
    variables = set(re.findall(r"\bKVFERRY_[A-Z_]+", text)) - {"KVFERRY_PORT"}
    keys = {DISK_KEY_ENV, REMOTE_KEY_ENV}  # secrets, which are no settings
    assert variables <= {setting.env for setting in describe()} | keys


def test_every_reason_for_a_miss_is_explained():
    page = (DOCS / "troubleshooting.md").read_text()
    for reason in set(Reason) - {Reason.NOTHING_MISSED}:
        assert f"`{reason.value}`" in page


def test_our_column_of_the_comparison_is_what_the_code_has():
    lines = (DOCS / "comparison.md").read_text().splitlines()
    ours = {row[1].strip(): row[2] for line in lines if len(row := line.split("|")) == 8}
    words = {name: set(re.findall(r"\w+", ours[name])) for name in ours}
    assert words["tiers"] >= {"host", "disk", *STORE_KINDS}
    named = words["eviction"] - {"learns", "when", "conversations", "return", "or", "your", "own"}
    assert named == set(POLICIES)
    assert words["cache control"] >= set(ACTIONS)
    settings = {setting.name for setting in describe()}
    assert {"tenants", "load_policy", "disk_size", "remote"} <= settings


def test_every_page_is_in_the_navigation():
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for page in DOCS.glob("*.md"):
        assert page.name in nav, f"{page.name} is not in mkdocs.yml"


FOLDERS = "cache|connectors|core|hostmem|scheduler|settings|sim|telemetry|tiers|tools|transfer"
PACKAGES = rf"`((?:(?:{FOLDERS})/[\w/]*)?"


def test_files_named_exist(text):
    for path in re.findall(r"`((?:deploy|bench|examples|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(PACKAGES + r"\w+\.py)`", text):
        assert (ROOT / "src" / "kvferry" / path).exists() or (ROOT / path).exists(), path


PROGRAMS = "curl|docker|git|helm|kubectl|kvferry|make|pip|python|vllm"
COMMAND = re.compile(rf"(?:\w+=\S+ )*(?:{PROGRAMS}) \S.*")
LOG_LINES = re.compile(r"kvferry (is|serves|supports|cannot|finds) .*")

HOW_RUN = {
    r"kvferry (--help|vllm-args|config|doctor|demo --help)\b.*": "here",
    r"kvferry demo(?! --servers| --help).*": "tests/integration/test_demo.py",
    r"kvferry demo --servers.*": "tests/integration/test_demo_servers.py",
    r"kvferry (top|explain)\b.*": "tests/integration/test_tools.py",
    r"kvferry control\b.*": "tests/integration/test_control_http.py",
    r"kvferry disk\b.*": "tests/unit/test_cli_disk.py",
    r"kvferry remote\b.*": "tests/fault/test_remote_listing.py",
    r"kvferry simulate\b.*": "tests/unit/test_cli_simulate.py",
    r"python (examples/.*|-m kvferry\..*)": "tests/integration/test_examples.py",
    r"python -m sglang.*": "tests/sglang/test_storage.py",
    r"python bench/.*": "not run: it takes minutes, or a GPU; its options are checked here",
    r"make (demo|fleet)": "tests/integration/test_demo.py",
    r"make (?!demo|fleet).*": "not run: it would run this test; the target is checked here",
    r"pip install .*": "not run: it needs a package index; make dist installs the wheel",
    r"git .*": "not run: it needs a repository elsewhere",
    r"vllm serve\b.*": "tests/integration/vllm/test_serve.py",
    r"curl .*": "tests/integration/vllm/test_control.py",
    r"(docker|kubectl|helm) .*": "not run: it needs a GPU or a cluster; see test_deploy.py",
}
"""The test that runs a command of the pages, or the reason why none does."""


def commands(page: Path) -> list[str]:
    """The commands of a page, without variables: in a block those after ``$`` if it has any."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    text, found = page.read_text(), list[str]()
    for language, block in fence.findall(text):
        if not language:
            lines = [line.strip() for line in re.sub(r"\\\n\s*", "", block).splitlines()]
            typed = [line[2:] for line in lines if line.startswith("$ ")]
            found += [line.split("  ")[0] for line in typed or lines]
    found += re.findall(r"`([^`\n]+)`", fence.sub("", text))
    found = [each for each in found if COMMAND.fullmatch(each) and not LOG_LINES.match(each)]
    return [re.sub(r"^(\w+=\S+ )*", "", each) for each in found]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
TYPED = sorted({command for page in PAGES for command in commands(page)})


def test_every_command_is_run_by_a_test_or_says_why_not():
    how = {command: [row for row in HOW_RUN if re.fullmatch(row, command)] for command in TYPED}
    assert [command for command, rows in how.items() if len(rows) != 1] == []
    assert {row for rows in how.values() for row in rows} == set(HOW_RUN)
    for place in HOW_RUN.values():
        assert not place.startswith("tests/") or (ROOT / place).exists(), place
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {c.split()[1] for c in TYPED if c.startswith("make ")} <= targets
    for command in TYPED:
        if command.startswith("python bench/"):
            program = (ROOT / command.split()[1]).read_text()
            for option in re.findall(r"--[a-z-]+", command):
                assert option in program, command


@pytest.mark.parametrize("command", [each for each in TYPED if each.startswith("kvferry ")])
def test_a_command_of_ours_is_understood_and_runs_where_it_needs_nothing(command):
    words = shlex.split(command)[1:]
    runs = any(re.fullmatch(row, command) for row, how in HOW_RUN.items() if how == "here")
    if runs:
        done = CliRunner().invoke(cli, words)
        assert done.exit_code in (0, 1), done.output  # 1: no GPU here
    else:
        found = cli.get_command(None, words[0])  # type: ignore[arg-type]
        assert found is not None
        while isinstance(found, click.Group) and len(words) > 1:
            words = words[1:]
            found = found.commands[words[0]]
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= {option for each in found.params for option in each.opts}
