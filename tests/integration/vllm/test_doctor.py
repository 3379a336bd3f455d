"""What ``kvferry doctor`` says of a vLLM, held against that vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from kvferry.connectors.vllm.versions import seeds_are_fixed
from kvferry.tools.doctor.checks import Environment, Grade, examine

FIRST_HASH = """
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
kv_cache_utils.init_none_hash(sha256)
print("hash", kv_cache_utils.NONE_HASH.hex())
"""


def first_hash(**env: str) -> str:
    """What a new process begins every chain of block hashes with."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_HASH],
        env={**plain, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("hash ")[2].strip()


@pytest.mark.parametrize("seed", [None, "random"])
def test_a_seed_is_asked_for_exactly_where_processes_differ_without(seed):
    env = {} if seed is None else {"PYTHONHASHSEED": seed}
    is_alike = first_hash(**env) == first_hash(**env)
    assert is_alike is (seed is not None or seeds_are_fixed(version("vllm")))


def test_this_vllm_is_known_and_would_find_the_connector():
    found = {finding.name: finding for finding in examine(Environment())}
    assert found["vllm"].grade is Grade.OK
    assert found["vllm"].words == version("vllm")
    assert found["connector"].grade is Grade.OK
