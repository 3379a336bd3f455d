"""Layer-wise overlap of every load, whatever else runs: the hardest case for correctness."""

from __future__ import annotations

from typing import Any

from kvferry.connectors.common.overlap import LayerwiseLoads, OverlapDecider


def overlap_every_load(monkeypatch: Any) -> None:
    """Beside other requests too, and however short the load."""
    monkeypatch.setattr(OverlapDecider, "is_due", lambda *_: True)
    monkeypatch.setattr(OverlapDecider, "leaves_a_block", lambda *_: False)
    monkeypatch.setattr(LayerwiseLoads, "tells_beside_others", True)
