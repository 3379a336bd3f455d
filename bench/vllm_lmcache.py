"""A prompt that comes back from host memory: LMCache beside kvferry, in vLLM on a CPU.

    python bench/vllm_lmcache.py            in an environment with vLLM for the CPU and lmcache

A small model with random weights. Each connector has a process of its own with the same prompts;
measured is the time of a request for one token: computed, from vLLM's own cache, and after that
cache was dropped. On a CPU "device" and host memory are the same memory: the figures say what the
two cost around the copy, nothing about a GPU or its link.

LMCache runs as its server, started here, and LMCacheMPConnector: inside vLLM's process (its
LMCacheConnectorV1) LMCache 0.5.6 has no way to copy on a CPU, and computes everything.

Exits with 77 where vLLM or lmcache is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SKIPPED = 77
GiB = 1 << 30
LMCACHE = "LMCacheMPConnector"
CONNECTORS = ("none", LMCACHE, "kvferry")
PORT = "BENCH_LMCACHE_PORT"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads that spin for each other crawl on a machine that others use too.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
}


def make_model(folder: Path) -> None:
    """Weights so large that a wrong block changes what the model says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def transfer_config(connector: str) -> dict[str, Any] | None:
    if connector == "none":
        return None
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = (
        {"host": GiB, "load_policy": "always"}
        if connector == "kvferry"
        else {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(os.environ[PORT])}
    )
    return config


@contextmanager
def lmcache_server() -> Iterator[int]:
    """LMCache's server with a GiB, for the length of a run; its port."""
    port, http = free_port(), free_port()
    order = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1"]
    order += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)]
    order += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    process = subprocess.Popen(order, env={**os.environ, **SETTINGS}, stdout=subprocess.DEVNULL)
    try:
        wait_for(http)
        yield port
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    give_up = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < give_up, "the server of LMCache does not answer"
        time.sleep(0.2)


class Asked:
    """Owns an engine; asks it for one token at a time and keeps the clock."""

    def __init__(self, model: str, connector: str) -> None:
        from vllm import LLM, SamplingParams
        from vllm.triton_utils import dispatcher

        # vLLM 0.32 asks everything that was imported for its dict; what LMCache imports (llvmlite)
        # has things that answer with something else, and vLLM would not start.
        dispatcher.vars = lambda one: d if hasattr(d := vars(one), "get") else {}
        began = time.perf_counter()
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            kv_transfer_config=transfer_config(connector),
        )
        self.start_seconds = time.perf_counter() - began
        self._how = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def ask(self, prompt: list[int]) -> tuple[float, list[int], int]:
        began = time.perf_counter()
        (output,) = self.llm.generate({"prompt_token_ids": prompt}, self._how, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def settle(self) -> None:
        """Time and steps for what is stored after a request has ended."""
        for _ in range(30):
            self.llm.llm_engine.step()
            time.sleep(0.1)

    def forget(self) -> None:
        """Drop vLLM's own cache, not the connector's."""
        give_up = time.monotonic() + 60
        while not self.llm.reset_prefix_cache():
            assert time.monotonic() < give_up, "blocks stay in use"
            self.llm.llm_engine.step()
            time.sleep(0.02)


def measure(model: str, connector: str, tokens: int, prompts: int, rounds: int) -> dict[str, Any]:
    rng, other = random.Random(3), random.Random(4)
    asked = Asked(model, connector)
    asked.ask([other.randrange(4000) for _ in range(tokens)])  # warm
    texts = [[rng.randrange(4000) for _ in range(tokens)] for _ in range(prompts)]
    computed = [asked.ask(text) for text in texts]
    own = [asked.ask(text) for text in texts]
    asked.settle()
    back = []
    for _ in range(rounds):
        for text in texts:
            asked.forget()
            back.append(asked.ask(text))
    return {
        "connector": connector,
        "start_s": asked.start_seconds,
        "computed_ms": [s * 1e3 for s, _, _ in computed],
        "own_cache_ms": [s * 1e3 for s, _, _ in own],
        "back_ms": [s * 1e3 for s, _, _ in back],
        "cached_tokens": min(cached for _, _, cached in back),
        "wrong": sum(answer != computed[at % prompts][1] for at, (_, answer, _) in enumerate(back)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt (default: 4096)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="in which each comes back")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--one", choices=CONNECTORS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if any(importlib.util.find_spec(name) is None for name in ("vllm", "lmcache")):
        print("vLLM and lmcache are needed, in one environment")
        return SKIPPED
    if given.one:
        found = measure(given.model, given.one, given.tokens, given.prompts, given.rounds)
        print("\n" + json.dumps(found), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with lmcache_server() as port:
            os.environ[PORT] = str(port)
            cases = [in_a_process(name, folder) for name in CONNECTORS]
    print(table(cases))
    if given.json:
        given.json.write_text(json.dumps(cases, indent=1))
    return 0


def in_a_process(connector: str, model: str) -> dict[str, Any]:
    order = [sys.executable, *sys.argv, "--one", connector, "--model", model]
    done = subprocess.run(order, env={**os.environ, **SETTINGS}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{connector} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(cases: list[dict[str, Any]]) -> str:
    rows = {
        "computed, ms": lambda one: f"{statistics.median(one['computed_ms']):.0f}",
        "from vLLM's own cache, ms": lambda one: f"{statistics.median(one['own_cache_ms']):.0f}",
        "after that was dropped, ms": lambda one: f"{statistics.median(one['back_ms']):.0f}",
        "least of these": lambda one: f"{min(one['back_ms']):.0f}",
        "tokens not computed": lambda one: str(one["cached_tokens"]),
        "wrong answers": lambda one: str(one["wrong"]),
        "start of the engine, s": lambda one: f"{one['start_s']:.1f}",
    }
    lines = ["| | " + " | ".join(one["connector"] for one in cases) + " |"]
    lines.append("|---|" + "---:|" * len(cases))
    lines += [f"| {name} | {' | '.join(map(of, cases))} |" for name, of in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
