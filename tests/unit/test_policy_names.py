"""The setting ``policy``: by name or by module path, refused with what to do, used everywhere."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tests.fakes.policies import Fifo

import kvferry
from kvferry.cache.policies import policy_named
from kvferry.cache.policies.lru import Lru
from kvferry.cache.policies.returns import Returns
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.settings.eviction import POLICIES

MINE = "tests.fakes.policies:Fifo"


def kind_of(pool: Pool) -> type:
    return type(pool.eviction.policy)


def test_every_name_makes_its_policy() -> None:
    for name, factory in POLICIES.items():
        pool = Pool(8, policy_named(name))
        assert f"{kind_of(pool).__module__}:{kind_of(pool).__name__}" == factory
    assert kind_of(Pool(8, policy_named(MINE))) is Fifo


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lur", r"expected lru.*package\.module:factory.*got 'lur' .str.; did you mean 'lru'\?"),
        (7, "got 7"),
        (None, "got None"),
        ("", "got ''"),
        ("a.b", "got 'a.b'"),
        ("a.b:c:d", "got 'a.b:c:d'"),
        ("os; x:y", "got"),
        ("x" * 10_000 + ":y", "got"),
    ],
)
def test_what_is_no_policy_is_refused(given: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Config.from_dict({"policy": given})
    assert len(str(refused.value)) < 400


class Lacking:
    def __init__(self, residents: object) -> None:
        pass


def broken(residents: object) -> None:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("no_such_module_here:Policy", "no_such_module_here cannot be imported"),
        ("tests.fakes.policies:Nobody", "has no factory Nobody that can be called"),
        ("tests.fakes.policies:annotations", "has no factory annotations that can be called"),
        ("broken_module_here:Policy", "importing broken_module_here failed: ValueError: not now"),
    ],
)
def test_what_cannot_be_found_is_named(
    policy: str, says: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "broken_module_here.py").write_text("raise ValueError('not now')\n")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(ConfigError, match=says):
        policy_named(policy)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Lacking", "gave Lacking, which is no eviction policy: it lacks insert, use, keep"),
        ("broken", "could not be made: ZeroDivisionError: by zero"),
    ],
)
def test_what_breaks_the_contract_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Pool(8, policy_named(f"{__name__}:{name}"))


@pytest.mark.parametrize(
    ("given", "host", "tier"),
    [
        ({}, Returns, Lru),
        ({"policy": MINE}, Fifo, Lru),
        ({"policy": "lru", "tier_policy": MINE}, Lru, Fifo),
    ],
)
def test_a_ferry_uses_one_for_its_host_and_one_for_its_tiers(
    given: dict[str, Any], host: type, tier: type
) -> None:
    kv = [np.zeros((8, 64), dtype=np.float32) for _ in range(2)]
    with kvferry.attach(kv, model="m", host="1MiB", tiers="memory:1MiB", **given) as ferry:
        scheduler = ferry._scheduler
        (below,) = scheduler.lower.tiers
        assert below.pool is not None
        assert kind_of(scheduler.pool) is host
        assert kind_of(below.pool) is tier
