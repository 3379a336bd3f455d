"""Published model configurations as groups of layers, and the table of them in docs/vllm.md.

Each group is the name of vLLM's spec and the fields that published configurations give it. Without
vLLM stand-ins have these attributes; ``tests/integration/vllm/test_kinds.py`` makes vLLM's own
specs of the same data and compares the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvferry.connectors.vllm.setup import support_of

BASES = {
    "MLAAttentionSpec": ("FullAttentionSpec",),
    "RSWASpec": ("FullAttentionSpec",),
    "SinkFullAttentionSpec": ("FullAttentionSpec",),
    "SlidingWindowMLASpec": ("SlidingWindowSpec",),
}


@dataclass(frozen=True)
class Era:
    """Versions of vLLM that say the same of their layers."""

    name: str
    recomputes_requests: bool
    tells: bool


ERAS = (
    Era("0.26 to 0.29", False, False),
    Era("0.30", True, False),
    Era("0.31 to 0.33", True, True),
)


@dataclass(frozen=True)
class Family:
    """Models whose layers keep the same; ``verified`` says how far that was tried."""

    name: str
    groups: tuple[tuple[str, dict[str, Any]], ...]
    verified: str
    block_tokens: int = 16
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, make: Callable[[str, dict[str, Any]], Any]) -> Any:
        """Its KV cache, of specs as ``make`` makes them."""
        groups = [
            SimpleNamespace(kv_cache_spec=make(kind, {"block_size": self.block_tokens, **given}))
            for kind, given in self.groups
        ]
        for group in groups:
            group.host_resident = self.options.get("host_resident", False)
        return SimpleNamespace(kv_cache_groups=groups, hash_block_size=self.block_tokens)

    def answer(self, make: Callable[[str, dict[str, Any]], Any], recomputes: bool) -> Any:
        """What kvferry says of it."""
        sizes = {"decode_context_parallel_size": self.options.get("dcp", 1)}
        server = SimpleNamespace(
            parallel_config=SimpleNamespace(**sizes),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
        )
        return support_of(server, self.config(make), recomputes_requests=recomputes)


FULL: tuple[str, dict[str, Any]] = ("FullAttentionSpec", {})
MLA: tuple[str, dict[str, Any]] = ("MLAAttentionSpec", {})
ENGINE, CARD, MODEL = "CPU engine", "H200 (0.26)", "model-based"


def window(tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "SlidingWindowSpec", {"sliding_window": tokens, **more}


def latent_window(tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "SlidingWindowMLASpec", {"sliding_window": tokens, **more}


def compressed(tokens: int) -> tuple[str, dict[str, Any]]:
    return "MLAAttentionSpec", {"tokens_per_state": tokens}


def state(drafts: int = 0, mode: str = "align", **more: Any) -> tuple[str, dict[str, Any]]:
    return "MambaSpec", {"mamba_cache_mode": mode, "num_speculative_blocks": drafts, **more}


RING = ("CircularBufferSpec", {"block_size": 8})
KEPT: dict[str, Any] = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 64}

FAMILIES = (
    Family("Llama 3, Qwen3, Mistral: full attention", (FULL,), f"{ENGINE}, {CARD}, {MODEL}"),
    Family("Mistral 7B 0.1: windows", (window(128),), f"{CARD}, {MODEL}"),
    Family("DeepSeek-V3, Kimi-K2: MLA", (MLA,), f"{CARD}, {MODEL}"),
    Family(
        "gpt-oss, Gemma 3: windows and full attention",
        (window(128), FULL),
        f"{ENGINE}, {CARD}, {MODEL}",
    ),
    Family(
        "the same with EAGLE-3 or several MTP modules (tokens retained beside the window)",
        (window(128, extra_retained_tokens=3), FULL),
        MODEL,
    ),
    Family(
        "Llama 4: chunks and full attention",
        (("ChunkedLocalAttentionSpec", {"attention_chunk_size": 8192}), FULL),
        f"{CARD}, {MODEL}",
    ),
    Family("Unlimited-OCR: reference window", (("RSWASpec", {"rswa_window": 128}),), MODEL),
    Family(
        "openPangu: sinks",
        (("SinkFullAttentionSpec", {"sink_len": 128}),),
        "by its spec alone: vLLM 0.32 does not start it",
    ),
    Family(
        "Mamba-2, Granite 4, Nemotron-H, Jamba",
        (state(), FULL),
        f"{ENGINE}, {CARD}, {MODEL}",
        528,
    ),
    Family("Qwen3-Next, Qwen3.5 to 3.8", (state(), FULL), f"{ENGINE} (Granite's), {MODEL}", 528),
    Family("the same with MTP", (state(3), FULL), MODEL, 528),
    Family("Kimi-K3", (state(0, **KEPT), MLA), MODEL, 768),
    Family("Kimi-K3 with MTP", (state(2, **KEPT), MLA), MODEL, 768),
    Family("Kimi-K2 with decode context parallel", (MLA,), MODEL, options={"dcp": 8}),
    Family(
        "DeepSeek-V4",
        (
            compressed(4),
            compressed(128),
            latent_window(128, block_size=64),
            latent_window(8, block_size=4),
            latent_window(128, block_size=8),
        ),
        MODEL,
        256,
    ),
    Family(
        "DeepSeek-V4.1 (bounded replay, MTP)",
        (compressed(2), latent_window(128, bounded_replay=True), RING),
        MODEL,
        256,
    ),
    Family("GLM5-next, Step5, Qwen4-exp", (state(3, **KEPT), MLA, compressed(8), RING), MODEL, 768),
    Family(
        "any model with `--mamba-cache-mode all`", (state(0, "all"), FULL), "idle by design", 528
    ),
    Family(
        "models whose KV vLLM keeps in host memory itself (HiSparse)",
        (MLA,),
        "idle by design",
        options={"host_resident": True},
    ),
)


def stand_in(tells: bool) -> Callable[[str, dict[str, Any]], Any]:
    """Makes specs with the attributes that are read, as far as such a vLLM says them."""

    def make(kind: str, given: dict[str, Any]) -> Any:
        known: dict[str, Any] = {}
        if tells:
            replays = bool(given.get("bounded_replay"))
            known["prefix_cacheable"] = not replays and kind != "CircularBufferSpec"
            known["prefix_replay_tokens"] = given["sliding_window"] if replays else 0
            known["dcp_sharded"] = kind in ("FullAttentionSpec", "MLAAttentionSpec")
        bases = tuple(type(base, (SimpleNamespace,), {}) for base in BASES.get(kind, ()))
        return type(kind, bases or (SimpleNamespace,), known)(**given)

    return make


def table() -> str:
    """The table of families by version, as Markdown."""
    eras = " | ".join(f"vLLM {era.name}" for era in ERAS)
    rows = [f"| models | {eras} | verified |", "|---|" + "---|" * (len(ERAS) + 1)]
    for family in FAMILIES:
        cells = []
        for era in ERAS:
            support = family.answer(stand_in(era.tells), era.recomputes_requests)
            cells.append(f"idle: {support.refusal}" if support.refusal else "**served**")
        rows.append(f"| {family.name} | {' | '.join(cells)} | {family.verified} |")
    return "\n".join(rows)
