"""A chat served by one engine of the demo: the tests' own helper, from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.demo_chat import serve

__all__ = ["serve"]
