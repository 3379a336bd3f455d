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
for capability, to_packed, uniform, (wide, steps, warps) in product(
    map(int, sys.argv[1:]),
    (False, True),
    (False, True),
    ((True, 8, 32), (True, 8, 8), (False, 8, 32)),
):
    variant = Variant(to_packed, uniform, wide, steps, warps)
    compiled = compile_kernel(variant, capability)
    image, name = compile_for(variant, capability)
    ptx = compiled.asm["ptx"]
    kinds = {"wide": "v2.b64", "word": "b64", "byte": "b8"}
    count = {
        name: [len(re.findall(rf"{verb}\\.global\\.{kind}\\b", ptx)) for verb in ("ld", "st")]
        for name, kind in kinds.items()
    }
    found.append({
        "capability": capability,
        "variant": str(variant),
        "image": image[:4].hex(),
        "name": name.decode(),
        "count": count,
        "shared": compiled.metadata.shared,
        "steps": steps,
        "is_wide": wide,
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
    assert len(told["found"]) == len(CAPABILITIES) * 12
    for kernel in told["found"]:
        assert kernel["image"] == b"\x7fELF".hex(), kernel
        assert kernel["name"] == "copy_rows"
        # One row per warp: each thread has its steps in flight, and not one access more.
        count, steps = kernel["count"], kernel["steps"]
        if kernel["is_wide"]:
            assert count["wide"] == [steps, steps], kernel
            assert count["word"][1] == count["byte"][1] == 0, kernel
        else:  # each word from two, and the bytes at both ends by one access
            assert count["word"][0] >= 2 * steps, kernel
            assert (count["word"][1], count["byte"]) == (steps, [1, 1]), kernel
        assert kernel["shared"] == 0, kernel
    assert told["names"][: len(told["arguments"])] == told["arguments"]
