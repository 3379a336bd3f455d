"""The cache layout we ask vLLM for: a block in one run, where this vLLM and its backend have it."""

from __future__ import annotations

from importlib import util
from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm import register
from kvferry.connectors.vllm import setup as translate
from kvferry.connectors.vllm.connector import KvferryConnector

HAS_LAYOUTS = util.find_spec("vllm.v1.kv_cache_layout") is not None


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


def test_older_versions_are_asked_for_blocks_across_layers():
    assert vars(KvferryConnector)["prefer_cross_layer_blocks"].fget(None) is True


@pytest.mark.skipif(not HAS_LAYOUTS, reason="this vLLM has no cache layouts to choose from")
@pytest.mark.parametrize(
    ("accepted", "taken"),
    [
        (["LBNHC", "BLNHC"], "BLNHC"),
        (["LBNHC", "BLHNC"], "LBNHC"),
        (["LBHNC"], "LBHNC"),
    ],
)
def test_vllm_takes_it_or_leaves_it(monkeypatch, accepted, taken):
    from vllm.config import KVTransferConfig
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    on_platform(monkeypatch)
    register()
    ours = KVTransferConfig(kv_connector="kvferry", kv_role="kv_both")
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=ours
    )
    assert resolve_kv_cache_layout(config, [accepted]).name == taken
    assert config.cache_config.kv_cache_layout == taken
