"""``python -m kvferry`` is ``kvferry``."""

from kvferry.cli.main import main

if __name__ == "__main__":
    main()
