"""Layer-wise overlap of every load, whatever else runs: the hardest case for correctness."""

from __future__ import annotations

from typing import Any

from kvferry.cache.policies.load_or_compute import OverlapDecision, Overlapping, OverlapVerdict
from kvferry.connectors.common.overlap import LayerwiseLoads


def overlap_every_load(monkeypatch: Any) -> None:
    """Beside other requests too, and however short the load."""
    alone = OverlapDecision(OverlapVerdict.ALONE)

    def decide(*_: object, has_others: bool) -> OverlapDecision:
        return alone

    monkeypatch.setattr(Overlapping, "decide", decide)
    monkeypatch.setattr(LayerwiseLoads, "tells_beside_others", True)
