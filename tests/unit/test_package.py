"""What ``import kvferry`` costs: numpy and nothing heavier."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

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
