"""Build the source archive and the wheel into dist/, and check them as their users will meet them.

    python tools/dist.py [--tag v0.2.0]

Checks: metadata (twine), contents, and an installation of the wheel into a clean environment of
every Python from 3.10 to 3.14 on this machine. With ``--tag`` the version must be the tag's.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
IN_CHECKOUTS_ONLY = (".ci/", ".github/", ".pre-commit-config.yaml")
PROGRAM = """
import kvferry, numpy as np
kv = [np.random.default_rng().random((8, 2, 16, 2, 64), np.float32)]
with kvferry.attach(kv, model="m", block_tokens=16, host="16MiB") as ferry:
    keys = ferry.keys(range(64))
    assert ferry.wait(ferry.store(keys, [0, 1, 2, 3])).ok
    assert len(ferry.match(keys)) == 4
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def works(python: str) -> bool:
    """Whether there is such a Python: a version manager may have a name that leads nowhere."""
    found = shutil.which(python)
    return bool(found) and not subprocess.run([found, "-c", ""], capture_output=True).returncode


def build() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (archive,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return archive, wheel


def check_contents(archive: Path, wheel: Path) -> None:
    """The wheel has the package and nothing else; the archive has all that git has."""
    ours = [line for line in run("git", "ls-files").splitlines() if line]
    package = {line.removeprefix("src/") for line in ours if line.startswith("src/kvferry/")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if packed != package:
        sys.exit(f"{wheel.name} differs from src: {sorted(packed ^ package)}")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    absent = {line for line in ours if not line.startswith(IN_CHECKOUTS_ONLY)} - names
    if absent:
        sys.exit(f"{archive.name} lacks {sorted(absent)}")


def check_installation(python: str, wheel: Path, version: str) -> None:
    """Install the wheel as users do: alone for the library, then with the command line."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = Path(folder, "bin", "python")
        run(own, "-m", "pip", "install", "-q", wheel)
        run(own, "-I", "-c", PROGRAM)
        run(own, "-m", "pip", "install", "-q", f"{wheel}[cli]")
        said = run(Path(folder, "bin", "kvferry"), "--version").split()
        if said != ["kvferry", version]:
            sys.exit(f"under {python} `kvferry --version` answers {said}, not {version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag of this release, such as v0.2.0")
    options = parser.parse_args()
    print("building", flush=True)
    archive, wheel = build()
    version = wheel.name.split("-")[1]
    if options.tag not in (None, f"v{version}"):
        sys.exit(f"The tag is {options.tag}, the version built is {version}: check out the tag.")
    check_contents(archive, wheel)
    found = [python for python in PYTHONS if works(python)]
    for python in found:
        print(f"installing under {python}", flush=True)
        check_installation(python, wheel, version)
    missing = sorted(set(PYTHONS) - set(found))
    print(f"dist/{archive.name} and dist/{wheel.name} are fit to be released.")
    if missing:
        print(f"Not tried, as they are not on this machine: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
