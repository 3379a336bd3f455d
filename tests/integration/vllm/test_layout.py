"""The cache layout we ask vLLM for: a block in one run, where this vLLM and its backend have it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm import setup as translate
from kvferry.connectors.vllm.connector import KvferryConnector


def on_platform(monkeypatch, *, cuda=True, major=9, layouts=True):
    from vllm import platforms

    capability = SimpleNamespace(major=major) if major else None
    platform = SimpleNamespace(
        is_cuda=lambda: cuda, get_device_capability=lambda: capability, device_type="cuda"
    )
    monkeypatch.setattr(platforms, "current_platform", platform)
    find = SimpleNamespace(find_spec=lambda name: object() if layouts else None)
    monkeypatch.setattr(translate, "util", find)


@pytest.mark.parametrize(
    ("machine", "layout"),
    [
        ({"major": 9}, "BLNHC"),
        ({"major": 10}, "BLHNC"),
        ({"major": None}, "BLNHC"),
        ({"cuda": False}, None),
        ({"layouts": False}, None),  # as 0.26 and 0.27, which ask prefer_cross_layer_blocks
    ],
    ids=str,
)
def test_what_is_asked_for(monkeypatch, machine, layout):
    on_platform(monkeypatch, **machine)
    assert KvferryConnector.get_required_kvcache_layout(None) == layout
