"""What ``import kvferry`` costs: numpy and nothing heavier."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kvferry

LOADED = """
import sys
before = set(sys.modules)
import kvferry
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_import_loads_numpy_and_the_standard_library_only():
    run = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=60
    )
    foreign = {
        name
        for name in run.stdout.split()
        if name.lstrip("_") not in sys.stdlib_module_names and name not in sys.stdlib_module_names
    }
    assert foreign <= {"kvferry", "numpy", "tomli"}


def test_the_version_is_that_of_the_installed_package():
    assert kvferry.__version__ == metadata.version("kvferry")


def test_types_ship_with_the_package():
    assert (Path(kvferry.__file__).parent / "py.typed").exists()


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_for_others_to_read_fit_their_schema(schema, files):
    found = sorted(map(str, ROOT.glob(files)))
    if not found:
        pytest.skip("a source archive has no .github")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    run = subprocess.run([*command, *found], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
