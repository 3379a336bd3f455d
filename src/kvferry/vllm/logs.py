"""Our log lines among vLLM's, in its form."""

from __future__ import annotations

import logging


def speak_as_vllm(level: str) -> None:
    """Send what kvferry logs where vLLM's lines go, from ``level`` on."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    ours.setLevel(level.upper())
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False
