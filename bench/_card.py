"""What benchmarks that use a card through torch ask first, and say of it afterwards."""

from __future__ import annotations

import importlib.util
import platform
import sys
import time

import kvferry


def what_is_missing() -> str:
    """Why nothing can be measured here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "needs torch"
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU"


def about() -> dict[str, str]:
    """Where, when and by which command it was measured."""
    import torch

    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kvferry": kvferry.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python", *sys.argv]),
    }
