"""Layer-wise overlap of every load, whatever else runs: the hardest case for correctness."""

from __future__ import annotations

from typing import Any

from kvferry.connectors.common.overlap import LayerwiseLoads, OverlapDecider


def overlap_every_load(monkeypatch: Any) -> None:
    """Beside other requests too, and however short the load."""

    def is_due(*_: object, at_least_one_before: bool = False) -> bool:
        return not at_least_one_before  # the last block need not be computed

    monkeypatch.setattr(OverlapDecider, "is_due", is_due)
    monkeypatch.setattr(LayerwiseLoads, "tells_beside_others", True)
