"""Model shapes in a real vLLM on a GPU: equal answers and real hits with kvferry.

    PYTHONPATH=$PYTHONPATH:src python3 bench/vllm_shapes.py --json shapes.json

With the trimmed vLLM 0.26 unpacked in DIR (see its README), from the repository's root:

    source env.sh DIR && PYTHONPATH=$PYTHONPATH:src python3 bench/vllm_shapes.py

Each shape is a small model with dummy weights in bfloat16, in two processes: vLLM alone, and vLLM
with kvferry. Prompts are answered, the GPU's prefix cache is dropped and all of the KV cache on the
GPU is overwritten, and the same prompts and their next turns are answered again. One line says, for
each shape,

  answers   how many are the ones that vLLM gives without kvferry, of how many. vLLM computes a
            little differently where it finds a part of a prompt in its own cache: both count
  loaded    tokens that came from host memory, of those that were asked for again
  control   answers that change when the KV cache is overwritten under a valid prefix cache: 0 means
            that a wrong byte would not show

vLLM before 0.30 cannot recover from a failed load with several groups of layers, so there kvferry
is idle for mixtures. For these shapes that precaution is switched off here (``forced``): no load
fails in this run. A shape that vLLM itself does not start says why, and is no failure.

Every process is ended after --seconds (120), and no new one starts after --total (280). --shape
runs only that one; --cpu runs all of it without a GPU, to see that it works. Exits with 1 if an
answer or a hit is wrong, and with 77 where vLLM or a GPU is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_connectors import what_is_missing

SKIPPED = 77
VOCABULARY = 4096
ANSWER_TOKENS = 16
POISON = 77
"""A byte nothing computes: every bfloat16 becomes 2.1e+08."""

_LAST_WORDS = 300


@dataclass(frozen=True, eq=False)
class Shape:
    """A model by its Hugging Face configuration, and vLLM's options for it."""

    name: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    backends: tuple[str | None, ...] = (None,)
    """Attention backends to try, one after the other, until vLLM starts."""
    environment: dict[str, str] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


def _model(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {**_COMMON, "architectures": [architecture], "model_type": model_type, **more}


_GEMMA = _model(
    "Gemma3ForCausalLM",
    "gemma3_text",
    sliding_window=512,
    layer_types=["sliding_attention"] * 2
    + ["full_attention"]
    + ["sliding_attention"] * 2
    + ["full_attention"],
    query_pre_attn_scalar=128,
    hidden_activation="gelu_pytorch_tanh",
    rope_local_base_freq=10000.0,
)

SHAPES = (
    Shape("full attention", _model("LlamaForCausalLM", "llama", mlp_bias=False)),
    Shape("windows alone", _model("MistralForCausalLM", "mistral", sliding_window=512)),
    Shape("windows and full attention", _GEMMA),
    Shape(
        "the same in one group",
        _GEMMA,
        options={"disable_hybrid_kv_cache_manager": True},
    ),
    Shape(
        "MLA",
        _model(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            num_key_value_heads=8,
            head_dim=64,  # of the part with positions, as transformers writes it
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=5,  # vLLM wants one layer with experts
            moe_layer_freq=1,
            moe_intermediate_size=512,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            scoring_func="softmax",
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        backends=(None, "TRITON_MLA"),
    ),
    Shape(
        "chunks and full attention",
        _model(
            "Llama4ForCausalLM",
            "llama4_text",
            intermediate_size_mlp=2048,
            attention_chunk_size=512,
            interleave_moe_layer_step=100,
            num_local_experts=1,
            num_experts_per_tok=1,
            no_rope_layers=[1, 1, 0, 1, 1, 0],
            layer_types=["chunked_attention", "chunked_attention", "full_attention"] * 2,
            use_qk_norm=True,
            attn_temperature_tuning=False,
        ),
        environment={"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"},
    ),
    Shape(
        "Mamba-2 and full attention",
        _model(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            shared_intermediate_size=2048,
            num_local_experts=0,
            num_experts_per_tok=0,
            position_embedding_type="rope",
            layer_types=["mamba", "mamba", "attention"] * 2,
            mamba_n_heads=32,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=256,
            embedding_multiplier=1.0,
            attention_multiplier=0.0884,
            residual_multiplier=1.0,
            logits_scaling=1.0,
        ),
        options={"mamba_cache_mode": "align"},
    ),
    Shape(
        "gated delta net and full attention",
        _model(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            partial_rotary_factor=0.25,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            decoder_sparse_step=1,
            mlp_only_layers=list(range(5)),  # vLLM wants one layer with experts
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        ),
        options={"mamba_cache_mode": "align"},
    ),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", action="append", choices=names, help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each process (120)")
    parser.add_argument("--total", type=float, default=280.0, help="of all of them (280)")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (4)")
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.child:
        name, backend, connector, out = args.child
        (shape,) = (each for each in SHAPES if each.name == name)
        found = answer(shape, backend or None, connector == "kvferry", on_cpu=args.cpu)
        Path(out).write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)
    missing = what_is_missing(needs_gpu=not args.cpu)
    if missing:
        print(f"cannot run here: {missing}", file=sys.stderr)
        return SKIPPED
    shapes = [shape for shape in SHAPES if shape.name in (args.shape or [s.name for s in SHAPES])]
    end = time.monotonic() + args.total
    results = {}
    failed = False
    with ThreadPoolExecutor(max(1, args.jobs // 2)) as pool:
        for shape, found in zip(shapes, pool.map(lambda each: measure(args, each, end), shapes)):  # noqa: B905
            results[shape.name] = found
            line, is_wrong = verdict(found)
            failed |= is_wrong
            print(f"{shape.name}: {line}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(failed)


# -- in the parent ------------------------------------------------------------------------------


def measure(args: argparse.Namespace, shape: Shape, end: float) -> dict[str, Any]:
    """What the shape's two processes found, side by side; ``fault`` where one found nothing."""
    found: dict[str, Any] = {}
    for backend in shape.backends:
        with ThreadPoolExecutor(2) as pool:
            runs = {
                name: pool.submit(run, args, shape, backend, name, end)
                for name in ("alone", "kvferry")
            }
            found = {name: one.result() for name, one in runs.items()} | {"backend": backend}
        if "fault" not in found["alone"]:
            break
    return found


def run(
    args: argparse.Namespace, shape: Shape, backend: str | None, connector: str, end: float
) -> dict[str, Any]:
    seconds = min(args.seconds, end - time.monotonic())
    if seconds <= 0:
        return {"fault": "no time was left"}
    folder = Path(tempfile.mkdtemp(prefix="shapes-"))
    out, log = folder / "out.json", folder / "log"
    command = [sys.executable, __file__, "--child", shape.name, backend or "", connector, str(out)]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        **shape.environment,
        "SHAPES_FOLDER": str(folder),
    }
    if args.cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    began = time.monotonic()
    with log.open("wb") as file:
        try:
            subprocess.run(
                command + ["--cpu"] * args.cpu,
                env=environment,
                stdout=file,
                stderr=file,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return {"fault": f"not done after {seconds:.0f} s: {_last_words(log)}"}
    if not out.exists():
        return {"fault": _last_words(log), "log": str(log)}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _last_words(log: Path) -> str:
    """The last line that names an error, or the last one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (named or lines or ["it said nothing"])[-1].strip()[-_LAST_WORDS:]


def verdict(found: dict[str, Any]) -> tuple[str, bool]:
    """One line for a shape, and whether kvferry is at fault."""
    alone, ours = found["alone"], found["kvferry"]
    if "fault" in alone:
        return f"vLLM does not run it: {alone['fault']}", False
    if "fault" in ours:
        return f"FAILED with kvferry only: {ours['fault']}", True
    pairs = [
        (given, {json.dumps(alone[phase][number]) for phase in alone["phases"]})
        for again in ("first", "again")
        for number, given in enumerate(ours[again])
    ]
    equal = sum(json.dumps(given) in known for given, known in pairs)
    loaded, asked = sum(ours["loaded"]), sum(ours["asked"])
    parts = [
        f"answers {equal} of {len(pairs)} equal",
        f"loaded {loaded} of {asked} tokens",
        f"control {ours['changed']} of {len(ours['again'])}",
        f"groups {ours['groups']}" + (" (forced)" if ours["forced"] else ""),
        f"{alone['seconds']:.0f} and {ours['seconds']:.0f} s",
    ]
    if ours["idle"]:
        parts.insert(0, f"kvferry is idle: {ours['idle']}")
    is_wrong = equal < len(pairs) or bool(ours["wrong"]) or (not ours["idle"] and not loaded)
    if ours["wrong"]:
        parts.insert(0, f"kvferry broke: {ours['wrong']}")
    return ("WRONG: " if is_wrong else "ok: ") + ", ".join(parts), is_wrong


# -- in a process of its own --------------------------------------------------------------------


def answer(shape: Shape, backend: str | None, has_kvferry: bool, *, on_cpu: bool) -> dict[str, Any]:
    """Prompts, the same prompts again, and their next turns, as this engine answers them."""
    random_weights()
    is_forced = has_kvferry and force_mixtures()
    engine = start(shape, backend, has_kvferry, on_cpu=on_cpu)
    rng = random.Random(1)
    lengths = (300, 1100, 1999) if on_cpu else (700, 3000, 6001)
    prompts = [[rng.randrange(10, VOCABULARY) for _ in range(length)] for length in lengths]
    first = [generate(engine, prompt) for prompt in prompts]
    turns = [
        prompt + given["tokens"] + [rng.randrange(10, VOCABULARY) for _ in range(150)]
        for prompt, given in zip(prompts, first, strict=True)
    ]
    if not has_kvferry:
        again = [generate(engine, prompt) for prompt in prompts + turns]
        forget(engine)
        cold = [generate(engine, prompt) for prompt in prompts + turns]
        return {
            "phases": ["first", "again", "cold"],
            "first": [each["tokens"] for each in first]
            + [each["tokens"] for each in cold[len(prompts) :]],
            "again": [each["tokens"] for each in again],
            "cold": [each["tokens"] for each in cold],
        }
    settle(engine)
    forget(engine)
    again = []
    for prompt in prompts + turns:
        poison(engine)
        again.append(generate(engine, prompt))
        settle(engine)
        forget(engine)
    changed = control(engine, prompts + turns, [each["tokens"] for each in again])
    session = scheduler_of(engine).connector._session
    serving = session.serving
    return {
        "first": [each["tokens"] for each in first],
        "again": [each["tokens"] for each in again],
        "loaded": [each["cached"] for each in again],
        "asked": [len(prompt) for prompt in prompts + turns],
        "changed": changed,
        "idle": session.idle_reason if session.refusal else "",
        "wrong": session.guard.reason,
        "forced": is_forced and len(session.setup.groups) > 1,
        "groups": [type(group).__name__ for group in session.setup.groups],
        "moved": {
            f"{source} to {target}": count
            for (source, target), count in (
                serving.scheduler.stats().bytes_moved.items() if serving is not None else ()
            )
        },
    }


def random_weights() -> None:
    """Larger dummy weights than vLLM's, whose models hardly look at their KV cache."""
    from vllm.model_executor.model_loader import weight_utils

    for name in ("initialize_dummy_weights", "initialize_single_dummy_weight"):
        function = getattr(weight_utils, name, None)
        if function is not None and function.__defaults__:
            function.__defaults__ = (-0.1, 0.1, *function.__defaults__[2:])


def force_mixtures() -> bool:
    """Serve several groups in a vLLM that cannot recover from failed loads; whether it is one."""
    from kvferry.connectors.vllm import connector, setup

    if connector._RECOMPUTES_REQUESTS:
        return False
    connector._RECOMPUTES_REQUESTS = True
    usual = setup.support_of

    def support_of(vllm_config: Any, kv_cache_config: Any, **more: Any) -> Any:
        if not hasattr(kv_cache_config, "hash_block_size"):
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

            _, size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            kv_cache_config.hash_block_size = size
        return usual(vllm_config, kv_cache_config, **more)

    setup.support_of = support_of
    return True


def start(shape: Shape, backend: str | None, has_kvferry: bool, *, on_cpu: bool) -> Any:
    from vllm import LLM

    folder = Path(os.environ["SHAPES_FOLDER"])
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    settings = {"host": "256MiB" if on_cpu else "4GiB", "load_policy": "always"}
    connector = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    options: dict[str, Any] = dict(shape.options)
    if backend:
        options["attention_config"] = {"backend": backend}
    if not on_cpu:
        options |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.15}
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from tests.integration.vllm import recurrent

        recurrent.allow()
        options["num_gpu_blocks_override"] = 1024
    return LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        kv_transfer_config=connector if has_kvferry else None,
        **options,
    )


def generate(engine: Any, prompt: list[int], *, loads: bool = True) -> dict[str, Any]:
    """What the model says after a prompt, alone, and how much of it was in a cache."""
    from vllm import SamplingParams

    hints = None if loads else {"kv_transfer_params": {"kvferry": {"do_not_load": True}}}
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        detokenize=False,
        ignore_eos=True,
        extra_args=hints,
    )
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0}


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def settle(engine: Any) -> None:
    """Step until every copy has landed and been told."""
    connector = scheduler_of(engine).connector
    end = time.monotonic() + 30.0
    while connector.has_pending_push_work() and time.monotonic() < end:
        engine.llm_engine.step()  # a request would leave blocks of its own to store
        time.sleep(0.001)


def forget(engine: Any, *, everywhere: bool = False) -> None:
    """Drop the GPU's prefix cache; ``everywhere`` drops the connector's as well."""
    for _ in range(50):
        if engine.reset_prefix_cache(False, everywhere):
            return
        settle(engine)
        time.sleep(0.05)
    raise RuntimeError("vLLM did not reset its prefix cache")


def control(engine: Any, prompts: list[list[int]], known: list[list[int]]) -> int:
    """How many answers change when the KV cache is overwritten while vLLM trusts it."""
    changed = 0
    for prompt, tokens in zip(prompts, known, strict=True):
        generate(engine, prompt)
        poison(engine)
        changed += generate(engine, prompt, loads=False)["tokens"] != tokens
        settle(engine)
        forget(engine, everywhere=True)
    return changed


def poison(engine: Any) -> None:
    """Overwrite all of the KV cache, so that only a real load can bring a hit."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core = engine.llm_engine.engine_core.engine_core
    cache = get_kv_transfer_group()._worker._cache
    registered = list(cache.tensors.values()) if cache is not None else []
    own = core.model_executor.driver_worker.worker.model_runner.kv_caches
    seen = set()
    for tensor in _tensors([registered, own]):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(POISON)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tensors(entry: Any) -> Iterator[Any]:
    if isinstance(entry, (list, tuple)):
        for each in entry:
            yield from _tensors(each)
    else:
        yield entry


if __name__ == "__main__":
    sys.exit(main())
