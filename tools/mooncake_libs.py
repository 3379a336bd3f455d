"""Makes the libraries that Mooncake's wheel needs findable: the system's, or Debian's, fetched.

``python tools/mooncake_libs.py`` prints the folder they are in (nothing: the system has them), and
fails with a line that says what to do where they cannot be had.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("libibverbs1", "libnuma1", "liburing2", "libnl-3-200", "libnl-route-3-200")
LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "libnuma.so.1")
FOLDER = Path(__file__).resolve().parents[1] / "build" / "mooncake-libs"


def find() -> Path | None:
    """The folder of fetched libraries; None where the system has them. LookupError: neither."""
    try:
        for name in LIBRARIES:
            ctypes.CDLL(name)
    except OSError as error:
        found = sorted(FOLDER.rglob("libibverbs.so.1"))
        if not found:
            raise LookupError(
                f"{error}: Mooncake needs {', '.join(PACKAGES[:3])}: apt-get install them, or run "
                "python tools/mooncake_libs.py where Debian's packages can be fetched"
            ) from error
        return found[0].parent
    return None


def fetch() -> None:
    """Download the packages and unpack them, without installing anything."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return
    parts = FOLDER.with_name(f"{FOLDER.name}-{os.getpid()}")
    parts.mkdir(parents=True)
    try:
        download = ["apt-get", "download", *PACKAGES]
        if _fails(download, parts):
            _fails(["apt-get", "update"], parts)
            if _fails(download, parts):
                return
        for package in parts.glob("*.deb"):
            subprocess.check_call(["dpkg", "-x", str(package), str(parts)])
        # In one folder: they need each other.
        for library in [*parts.rglob("*.so.*")]:
            if library.parent != parts:
                library.replace(parts / library.name)
        parts.replace(FOLDER)
    except (OSError, subprocess.CalledProcessError):
        return
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _fails(command: list[str], folder: Path) -> bool:
    silent = subprocess.DEVNULL
    return subprocess.call(command, cwd=folder, stdout=silent, stderr=silent) != 0


def main() -> None:
    try:
        found = find()
    except LookupError:
        fetch()
        try:
            found = find()
        except LookupError as error:
            sys.exit(str(error))
    if found is not None:
        print(found)


if __name__ == "__main__":
    main()
