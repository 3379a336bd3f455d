"""Which vLLM is served: by its number as far as it was tested, beyond that by its hooks."""

import logging

import pytest

from kvferry.connectors.vllm.versions import misfits, require_fit
from kvferry.errors import ConfigError

TESTED = ["0.26.0", "0.27.1", "0.33.0", "0.30.1rc1+cpu", "0.33.9.dev3"]
NEWER = ["0.34.0", "0.34.0.dev1+g12", "0.40.2", "1.0.0"]


class Base:
    """As much of a connector's base class as a rule needs."""

    def __init__(self, config, role, caches=None): ...

    def _get_connector_metadata(self): ...

    def start_load_kv(self, forward_context, **kwargs): ...

    def get_finished(self, finished_req_ids): ...

    def reset_cache(self): ...

    @property
    def requires_kv_delivery(self): ...

    @classmethod
    def build_kv_connector_stats(cls, data=None): ...


class Connector(Base):
    def __init__(self, config, role, caches=None): ...

    def start_load_kv(self, forward_context, **kwargs): ...

    def get_finished(self, finished_req_ids): ...

    @property
    def requires_kv_delivery(self): ...

    @classmethod
    def build_kv_connector_stats(cls, data=None): ...

    def prefer_cross_layer_blocks(self):
        """Only an older vLLM asks for this."""

    def _at_worker(self):
        """Ours alone: vLLM knows nothing of it."""


def under(**changes):
    """Our connector under a base class that has changed; None takes a hook away."""
    members = {**vars(Base), **changes}
    base = type("Base", (), {name: one for name, one in members.items() if one is not None})
    return type("Connector", (base,), dict(vars(Connector)))


@pytest.mark.parametrize("version", TESTED)
def test_a_tested_version_is_served_without_a_word(version, caplog):
    require_fit(version, under(get_finished=None))  # not even looked at
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.25.1", "0.9.9", "unknown", ""])
def test_an_older_or_unknown_one_is_refused_with_the_range(version):
    with pytest.raises(ConfigError, match=r"0\.26 to 0\.33.*" + version):
        require_fit(version, Connector)


@pytest.mark.parametrize("version", NEWER)
def test_a_newer_one_whose_hooks_fit_is_served_with_a_warning(version, caplog):
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        require_fit(version, Connector)
    (record,) = caplog.records
    assert f"vLLM {version} is newer than 0.33" in record.getMessage()


def more_arguments(self, finished_req_ids, step): ...
def other_name(self, finished): ...
def other_order(self, role, config, caches=None): ...
def keyword_only(self, finished_req_ids, *, step): ...
def any_keyword(self, finished_req_ids, **kwargs): ...
def now_required(cls, data): ...
def may_be_left_out(self, finished_req_ids=None): ...


CHANGED = {
    "an argument more": ({"get_finished": more_arguments}, "get_finished"),
    "an argument of another name": ({"get_finished": other_name}, "get_finished"),
    "arguments in another order": ({"__init__": other_order}, "__init__"),
    "a keyword that must be given": ({"get_finished": keyword_only}, "step"),
    "any keyword": ({"get_finished": any_keyword}, r"\*\*kwargs"),
    "an argument that may be left out": ({"get_finished": may_be_left_out}, "get_finished"),
    "a method made of a property": ({"requires_kv_delivery": lambda self: None}, "property"),
    "a hook that is gone": ({"get_finished": None}, "get_finished is no more"),
    "what we call is gone": ({"_get_connector_metadata": None}, "_get_connector_metadata"),
}


@pytest.mark.parametrize(("changes", "words"), CHANGED.values(), ids=CHANGED)
def test_a_newer_one_with_other_hooks_is_refused_by_the_hook(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        require_fit("0.34.0", under(**changes))
    assert "0.26 to 0.33" in str(refused.value)


def shorter(cls, data="x"): ...
def fewer_arguments(self, config, role): ...
def annotated(self, finished_req_ids: "set[str]") -> "tuple[set[str], set[str]] | None": ...


HARMLESS = {
    "another default": {"build_kv_connector_stats": classmethod(shorter)},
    "an argument that is now required": {"build_kv_connector_stats": classmethod(now_required)},
    "an argument less that may be left out here": {"__init__": fewer_arguments},
    "other annotations": {"get_finished": annotated},
    "a hook we do not answer": {"on_new_request": lambda self, request: None},
    "a hook we do not answer is gone": {"reset_cache": None},
}


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_what_no_call_can_notice_is_no_misfit(changes):
    assert misfits(under(**changes)) == []


def test_every_misfit_is_named():
    assert len(misfits(under(get_finished=None, start_load_kv=None))) == 2
