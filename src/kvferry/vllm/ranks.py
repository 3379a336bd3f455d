"""A rank's host memory and copy engine, for whatever device vLLM keeps its KV on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.errors import ConfigError
from kvferry.rank import RankMemory, open_on_cpu, open_on_gpu
from kvferry.types import Rank


def open_rank(
    device: Any, layouts: Sequence[GroupLayout], config: Config, rank: Rank, num_ranks_here: int
) -> RankMemory:
    """``device`` is the tensors' own. On a CPU vLLM computes in the thread that calls us."""
    if device.type == "cpu":
        return open_on_cpu(layouts, config, rank=rank, num_ranks_here=num_ranks_here)
    if device.type == "cuda":
        return open_on_gpu(
            layouts, config, rank=rank, device=device.index or 0, num_ranks_here=num_ranks_here
        )
    raise ConfigError(f"kvferry has no copy engine for KV tensors on {device}")
