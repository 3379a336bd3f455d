"""All of the connector but the classes vLLM loads can be imported where there is no vLLM."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import kvferry.connectors

OF_VLLM = {"kvferry.connectors.vllm.connector", "kvferry.connectors.vllm.metrics"}
"""Made of vLLM's own classes."""

LOOK = """
import importlib, json, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "torch"):
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


def test_only_what_is_made_of_vllms_classes_needs_vllm():
    found = pkgutil.walk_packages(kvferry.connectors.__path__, "kvferry.connectors.")
    names = [module.name for module in found]
    assert len(names) > 15
    assert set(names) >= OF_VLLM
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *names], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == dict.fromkeys(OF_VLLM, "vllm")
