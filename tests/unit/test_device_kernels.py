"""The copy kernel compiles for the cards we name, without one, and to the code we mean.

In a process of its own: the rest of the tests run the kernel in Triton's interpreter, which must be
chosen before the kernel is defined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util

import pytest
from tests.conftest import PROFILE

pytestmark = pytest.mark.skipif(util.find_spec("triton") is None, reason="needs Triton")

SCRIPT = """
import inspect, json, re, sys
from itertools import product
from kvferry.transfer.kernels import triton_copy
from kvferry.transfer.kernels.launch import ARGUMENTS, Variant
from kvferry.transfer.kernels.launch import compile_for, compile_kernel

found = []
for capability, to_packed, (linear, single), uniform, (width, vector, steps, warps) in product(
    map(int, sys.argv[1:]),
    (False, True),
    ((False, False), (True, False), (True, True)),
    (False, True),
    ((8, 2, 8, 32), (8, 2, 8, 8), (1, 1, 8, 8)),
):
    variant = Variant(to_packed, linear, uniform, width, vector, steps, warps, single)
    compiled = compile_kernel(variant, capability)
    image, name = compile_for(variant, capability)
    kind = "v2.b64" if vector == 2 else "b8"
    ptx = compiled.asm["ptx"]
    found.append({
        "capability": capability,
        "variant": str(variant),
        "image": image[:4].hex(),
        "name": name.decode(),
        "loads": len(re.findall(rf"ld\\.global\\.{kind}\\b", ptx)),
        "stores": len(re.findall(rf"st\\.global\\.{kind}\\b", ptx)),
        "shared": compiled.metadata.shared,
        "steps": steps,
    })
names = list(inspect.signature(triton_copy.copy_rows.fn).parameters)
print(json.dumps({"found": found, "names": names, "arguments": list(ARGUMENTS)}))
"""
CAPABILITIES = (80, 90, 100) if PROFILE == "soak" else (90,)


def test_every_variant_compiles_to_wide_accesses() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, CAPABILITIES)],  # one process: Triton is heavy
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert len(told["found"]) == len(CAPABILITIES) * 36
    for kernel in told["found"]:
        assert kernel["image"] == b"\x7fELF".hex(), kernel
        assert kernel["name"] == "copy_rows"
        # One row per warp: each thread has its steps in flight, and not one access more.
        assert kernel["loads"] == kernel["stores"] == kernel["steps"], kernel
        assert kernel["shared"] == 0, kernel
    assert told["names"][: len(told["arguments"])] == told["arguments"]
