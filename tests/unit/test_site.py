"""The pages people copy from: their commands, programs and names are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvferry.config import describe
from kvferry.scheduler.journal import Reason
from kvferry.settings.eviction import POLICIES
from kvferry.settings.tiers import KEY_ENV, REMOTE_KEY_ENV, STORE_KINDS
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
    known = {name for metric in catalog() for name in metric.series}
    named = set(re.findall(r"\bkvferry_[a-z_]+[a-z]", text))
    assert named <= known, named - known


def test_settings_named_exist(text):
    known = {setting.name for setting in describe()}
    named = set(re.findall(r"`(\w+) = ", text))
    assert named <= known, named - known
    variables = set(re.findall(r"KVFERRY_[A-Z_]+", text)) - {"KVFERRY_PORT"}
    keys = {KEY_ENV, REMOTE_KEY_ENV}  # secrets, which are no settings
    assert variables <= {setting.env for setting in describe()} | keys


def test_commands_and_options_named_exist(text):
    for line in re.findall(r"^\s*(?:\$ )?(?:\w+=\S+ )?kvferry ([a-z].*)$", text, re.M):
        words = line.split("#")[0].split("   ")[0].split()
        if words[0] not in cli.list_commands(None):  # type: ignore[arg-type]
            continue  # prose
        command = cli.get_command(None, words[0])  # type: ignore[arg-type]
        assert command is not None
        options = {o for p in command.params for o in p.opts}
        assert {w for w in words[1:] if w.startswith("--")} <= options, line


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
    assert named == {kind.name for kind in POLICIES}
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
