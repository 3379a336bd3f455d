"""Every hook vLLM has for connectors is answered here, or left to vLLM for a reason."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)

from kvferry.connectors.vllm.connector import KvferryConnector
from kvferry.connectors.vllm.versions import NEWEST, misfits, require_fit
from kvferry.errors import ConfigError

LEFT_TO_VLLM = {
    # what vLLM itself keeps in a connector
    "role",
    "clear_connector_metadata",
    "has_connector_metadata",
    # our stores hold their blocks, so nothing is to be saved before a preemption or a reuse
    "handle_preemptions",
    # stores are of whole blocks after the forward; loads that it waits for ask for no other graphs
    "finish_forward",
    "reset_capture_state",
    "requires_piecewise_for_cudagraph",
    # copies are our own, into memory that is our own
    "get_mem_pool_context",
    "set_host_xfer_buffer_ops",
    # every rank answers for every request, and loads every group with a hash
    "get_finished_count",
    "get_loaded_kv_cache_group_ids",
    # events come from the scheduler's side
    "get_kv_connector_kv_cache_events",
    # whole blocks and the states at their ends only
    "register_finished_partial_tail",
    "supports_divergent_local_hybrid_hits",
}


def hooks_of(*classes):
    return {
        name
        for one in classes
        for name, member in vars(one).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
    }


def test_every_hook_has_an_answer():
    ours, theirs = hooks_of(KvferryConnector), hooks_of(KVConnectorBase_V1, SupportsHMA)
    assert len(theirs) > 30
    assert theirs - ours - LEFT_TO_VLLM == set()
    assert not LEFT_TO_VLLM & ours


def test_hooks_take_what_vllm_gives_them():
    """What kvferry looks at where vLLM is newer than it knows finds no fault with those it knows.

    An older vLLM may lack hooks that came later; none that it has may be another one.
    """
    wrong = misfits(KvferryConnector)
    assert [words for words in wrong if not words.endswith("is no more")] == []
    number = tuple(map(int, vllm.__version__.split(".")[:2]))
    assert (wrong == []) or number < NEWEST, wrong


def test_a_newer_vllm_with_these_hooks_is_served(monkeypatch, caplog):
    if misfits(KvferryConnector):
        pytest.skip("an older vLLM, with fewer hooks")
    with caplog.at_level("WARNING", logger="kvferry"):
        monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
        require_fit("99.0.0", KvferryConnector)
    assert "serves" in caplog.text
    monkeypatch.delattr(KVConnectorBase_V1, "take_events")
    with pytest.raises(ConfigError, match="take_events is no more"):
        require_fit("99.0.0", KvferryConnector)


def test_several_groups_are_supported():
    assert supports_hma(KvferryConnector)


@pytest.mark.skipif(not hasattr(base, "CacheHitSource"), reason="this vLLM counts no hits by tier")
def test_hits_are_told_in_vllms_own_words():
    connector: Any = object.__new__(KvferryConnector)
    told = {"host": 32, "disk": 16, "remote": 8, "memory": 8}
    connector._session = SimpleNamespace(hit_sources=lambda name, count: told)
    found = connector.get_external_cache_hit_sources(SimpleNamespace(request_id="r"), 64)
    words = base.CacheHitSource
    assert found == {words.HOST: 32, words.DISK: 16, words.EXTERNAL_UNSPECIFIED: 16}
    assert connector.get_external_cache_hit_sources(None, 0) == {}
