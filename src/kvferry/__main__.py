"""``python -m kvferry`` is ``kvferry``."""

from kvferry.tools.cli.main import main

if __name__ == "__main__":
    main()
