"""Entry point of the command ``kvferry``. Imports no optional package before it is found."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from kvferry.errors import install

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line. If it lacks a package, print how to install it and exit with 2."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"kvferry's command line needs {' and '.join(missing)}: {install('cli')}",
            file=sys.stderr,
        )
        sys.exit(2)
    from kvferry.tools.cli.commands import kvferry

    kvferry()


if __name__ == "__main__":
    main()
