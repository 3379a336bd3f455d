"""The public conversation trace, where it lies beside the project; tests that need it skip else."""

from __future__ import annotations

from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl"

needs_published = pytest.mark.skipif(
    not PUBLISHED.exists(), reason="the published trace is not beside the project"
)
