"""Only the classes that an engine loads need that engine to be imported."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import kvferry.connectors

MADE_OF = {
    "kvferry.connectors.sglang.storage": "torch",  # which SGLang brings
    "kvferry.connectors.vllm.connector": "vllm",
    "kvferry.connectors.vllm.metrics": "vllm",
    "kvferry.connectors.vllm.policy": "vllm",
    "kvferry.connectors.vllm.tiering": "vllm",
}
"""The modules that derive from an engine's own classes, and what they miss first without it."""

LOOK = """
import importlib, json, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang", "vllm", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name.split(".")[0]
print(json.dumps(failed))
"""


def test_only_what_is_made_of_an_engines_classes_needs_it():
    found = pkgutil.walk_packages(kvferry.connectors.__path__, "kvferry.connectors.")
    names = [module.name for module in found]
    assert len(names) > 15
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *names], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == MADE_OF
