"""The copy engine for the platform vLLM runs on."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.config import Config
from kvferry.device.cpu import CpuEngine
from kvferry.device.layout import GroupLayout
from kvferry.errors import ConfigError
from kvferry.tiers import HostTier
from kvferry.types import Rank
from kvferry.vllm.worker_side import OpenEngine
from kvferry.worker import Mover


def open_engine(config: Config) -> OpenEngine:
    """What opens a rank's engine once its tensors are known."""

    def on_cpu(layouts: Sequence[GroupLayout], host: HostTier, rank: Rank) -> Mover:
        # vLLM computes in the thread that calls us: what was written before a store is there.
        return CpuEngine(layouts, host.rows, rank=rank)

    def nowhere(layouts: Sequence[GroupLayout], host: HostTier, rank: Rank) -> Mover:
        raise ConfigError("kvferry has no copy engine for this platform")

    return on_cpu if _on_cpu() else nowhere


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
