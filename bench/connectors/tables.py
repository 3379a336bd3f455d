"""What a run found, as one Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from _tables import table
from connectors.engine import CONNECTORS, GiB
from connectors.toggled import by_place

Run = dict[str, Any]

NOTES = """\
Each connector ran in a process of its own, with its own defaults and the same host memory, in one
run: one after the other, beside an engine without a connector that was idle while they worked; with
small pages all at once, and their prompts in turn. The model has the shape of Qwen2.5-7B (28
layers) and dummy weights; bf16, FlashAttention 3, CUDA graphs, blocks of 16 tokens. **Cold**:
nothing is cached. **Device**: the prompt is in the GPU's own prefix cache. **Host**: that cache was
dropped, the prompt's KV is in host memory. **Floor**: device + the KV's bytes over the speed of one
large pinned copy, timed in the same process. Device and host hits alternate; times are medians,
from adding the request to its first token, in the process that runs the engine."""


def report(data: dict[str, Any]) -> str:
    """The whole page; parts that were not run are left out."""
    runs = data["runs"]
    shapes = list(dict.fromkeys(run["case"]["shape"] for run in runs))
    parts = [_title(data), NOTES]
    for shape in shapes:
        own = [run for run in runs if run["case"]["shape"] == shape]
        parts += [_heading(own), _first_token(own), _over(own), _bytes(own)]
    first = [run for run in runs if run["case"]["shape"] == shapes[0]] if shapes else []
    parts += [_start(first), _fits(first), _hooks(first), _toggled(first)]
    if data.get("left_out"):
        parts.append("Not run for want of time: " + ", ".join(data["left_out"]) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(data: dict[str, Any]) -> str:
    p = data["provenance"]
    return (
        f"# vLLM with and without connectors on one {p['gpu']}\n\n"
        f"{p['gpu']}, {p['link']}, driver {p['driver']}, vLLM {p['vllm']}, torch {p['torch']}, "
        f"Triton {p['triton']}, Python {p['python']}, kvferry {p['kvferry']}, {p['date']}. "
        f"One run of `{p['command']}`."
    )


def _heading(runs: Sequence[Run]) -> str:
    case = runs[0]["case"]
    page = 2 * 16 * 128 * 2 * (4 if case["shape"] == "qwen7b" else 1)
    return (
        f"## {case['shape']}: a layer's page of a block is {page // 1024} KiB\n\n"
        f"Device cache {case['device_bytes'] / GiB:g} GiB, "
        f"host memory {case['pool_bytes'] / GiB:g} GiB."
    )


def _with(runs: Iterable[Run], section: str) -> list[Run]:
    """The first run of each connector that has this section, in the usual order."""
    found: dict[str, Run] = {}
    for run in runs:
        if section in run:
            found.setdefault(run["case"]["connector"], run)
    return [found[name] for name in CONNECTORS if name in found]


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "–"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f}–{max(values):.1f}" if values else "–"


def _first_token(runs: Sequence[Run]) -> str:
    rows = []
    chosen = _with(runs, "ttft")
    for run in chosen:
        found = run["ttft"]
        host, floor = found["host_ms"], found["floor_ms"]
        rows.append(
            (
                run["case"]["connector"],
                _ms(found["cold_ms"]),
                _ms(found["device_ms"]),
                _ms(host),
                _range(host),
                f"{floor:.1f}" if host else "–",
                f"{statistics.median(host) / floor:.2f}" if host else "–",
                f"{found['loaded_blocks']}",
            )
        )
    if not rows:
        return ""
    case, found = chosen[0]["case"], chosen[0]["ttft"]
    return (
        f"### Time to first token, ms: one prompt of {case['prompt_tokens']:,} tokens "
        f"({found['kv_bytes'] / 1e6:.0f} MB of KV)\n\n"
        + table(
            ("", "cold", "device", "host", "from–to", "floor", "host / floor", "blocks loaded"),
            rows,
        )
        + "\n\nLink in each process, GB/s: "
        + ", ".join(f"{run['ttft']['link_gb_per_s']:.1f}" for run in chosen)
        + "."
    )


def _over(runs: Sequence[Run]) -> str:
    rows = []
    chosen = _with(runs, "over")
    for run in chosen:
        rounds = run["over"]
        requests = sum(r["requests"] for r in rounds)
        seconds = sum(r["seconds"] for r in rounds)
        times = sorted(t for r in rounds for t in r["all_ttft_ms"])
        share = sum(r["cached_tokens"] for r in rounds) / sum(r["prompt_tokens"] for r in rounds)
        rows.append(
            (
                run["case"]["connector"],
                f"{requests / seconds:.2f}",
                ", ".join(f"{r['requests_per_s']:.2f}" for r in rounds),
                f"{statistics.median(times):.0f}",
                f"{times[-(-95 * len(times) // 100) - 1]:.0f}",
                f"{share:.0%}",
                str(requests),
            )
        )
    if not rows:
        return ""
    load = chosen[0]["case"]["over"]
    last = load["first_tokens"] + load["num_turns"] * (load["turn_tokens"] + load["answer_tokens"])
    tokens = load["num_conversations"] * (last - load["turn_tokens"])
    room = (chosen[0]["start"]["num_gpu_blocks"] - 1) * 16
    return (
        f"### Conversations that need {tokens / room:.1f} times the device cache\n\n"
        f"{load['num_conversations']} conversations in turn, {load['num_clients']} requests at a "
        f"time: {load['first_tokens']:,} tokens first, {load['turn_tokens']} more in every turn, "
        f"answers of {load['answer_tokens']}; the first turns are not counted.\n\n"
        + table(
            ("", "requests/s", "by round", "p50 TTFT ms", "p95 TTFT ms", "cached", "requests"), rows
        )
    )


def _bytes(runs: Sequence[Run]) -> str:
    rows = []
    plain = [run for run in _with(runs, "ttft") if run["case"]["connector"] == "none"]
    for run in _with(runs, "bytes"):
        found = run["bytes"]
        answers = run.get("ttft", {}).get("answers", [])
        right = (plain[0]["ttft"]["answers"] if plain else answers)[: len(answers)]
        replays = [
            (own["device"], answer[name])
            for own, answer in zip(right, answers, strict=True)
            for name in answer
        ]
        rows.append(
            (
                run["case"]["connector"],
                f"{found['wrong_blocks']} of {found['blocks']}",
                f"{found['wrong_answers']} of {found['answers']}",
                f"{_wrong(replays)} of {sum(len(a) for a, _ in replays)}",
                f"{found['control_wrong_blocks']}, {found['control_wrong_answers']}",
            )
        )
    if not rows:
        return ""
    return (
        "### Are the bytes right?\n\n"
        "Digests of all layers of every block before it left the GPU and after it came back, the "
        "GPU's whole KV cache overwritten in between; tokens of the answers of the same prompt "
        "from the GPU's own cache and from host memory; and all timed answers, cold, device and "
        "host, against those without a connector (its own, where that was not run). The control "
        "overwrites blocks that the GPU's cache still trusts: blocks and tokens must come out "
        "wrong.\n\n"
        + table(("", "wrong blocks", "wrong tokens", "in timed answers", "control finds"), rows)
    )


def _wrong(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
    return sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))


def _start(runs: Sequence[Run]) -> str:
    rows: list[tuple[str, str]] = []
    seen: set[str] = set()
    for run in runs:
        name = run["case"]["connector"]
        again = ", again" if name in seen else ""
        seen.add(name)
        if "start" in run:
            rows.append((f"{name}{again}", f"{run['start']['seconds']:.1f}"))
    if not rows:
        return ""
    grown = next((run["warm"] for run in runs if run.get("warm")), "")
    words = (
        "\n\nkvferry's first start on a machine measures its copy paths. Its host memory goes on "
        f"growing behind the start: {grown}."
        if grown
        else ""
    )
    return (
        "## Start of the engine\n\nSeconds, imports left out, vLLM's compile cache filled; in the "
        "order of the processes.\n\n" + table(("", "seconds"), rows) + words
    )


def _fits(runs: Sequence[Run]) -> str:
    """Every round against the rounds without a connector just before and just after it."""
    rows = []
    chosen = [run for run in _with(runs, "fits") if run["fits"]["own"]]
    for run in chosen:
        seconds = [r["seconds"] for r in run["fits"]["own"]]
        plain = [r["seconds"] for r in run["fits"]["none"]]
        ratios = [2 * s / (a + b) for s, a, b in zip(seconds, plain, plain[1:], strict=False)]
        if not ratios:
            continue
        rows.append(
            (
                run["case"]["connector"],
                f"{statistics.median(seconds):.3f}",
                f"{statistics.median(plain):.3f}",
                f"{statistics.median(ratios):.4f}",
                f"{statistics.fmean(ratios):.4f}",
                f"{min(ratios):.4f}–{max(ratios):.4f}",
                f"{max(plain) / min(plain):.4f}",
                str(len(ratios)),
            )
        )
    if not rows:
        return ""
    load = chosen[0]["case"]["fits"]
    return (
        "## What it costs where everything fits the device\n\n"
        f"{load['num_conversations']} conversations of {load['num_turns']} turns at once: "
        f"{load['first_tokens']:,} tokens first, {load['turn_tokens']} more in every turn, answers "
        f"of {load['answer_tokens']}. Rounds in turn with the engine that has no connector; the "
        "ratio is to the mean of its rounds just before and just after. The last but one column "
        "is how far its own rounds differ.\n\n"
        + table(
            (
                "",
                "seconds",
                "without",
                "median ratio",
                "mean",
                "from–to",
                "without, max/min",
                "rounds",
            ),
            rows,
        )
    )


def _hooks(runs: Sequence[Run]) -> str:
    """The other view of the same: the time vLLM itself spent in the hooks."""
    rows = []
    for run in _with(runs, "hooks"):
        found = run["hooks"]
        of: dict[str, float] = {"scheduler": 0.0, "worker": 0.0}
        for name, hook in found["hooks"].items():
            of[name.split(":")[0]] += hook["seconds"]
        rows.append(
            (
                run["case"]["connector"],
                *(f"{1e3 * seconds:.1f}" for seconds in of.values()),
                f"{sum(of.values()) / found['seconds']:.2%}",
            )
        )
    if not rows:
        return ""
    return (
        "### Time in the connectors' hooks in one more such round, ms\n\n"
        "All of it counts where a step waits for vLLM's own Python, and none where it waits for "
        "the GPU.\n\n" + table(("", "scheduler", "worker", "of the round"), rows)
    )


def _toggled(runs: Sequence[Run]) -> str:
    """The third view: the same engine with its hooks at work and without."""
    for run in _with(runs, "toggled"):
        found = run["toggled"]
        plain = by_place(found["none"])
        # A step that prefills takes several times as long as one that only decodes.
        decodes = [ms < 1.5 * statistics.median(plain) for ms in plain] if plain else []
        rows = []
        for kind, name in (("none", "without its hooks"), ("hooks", "with them")):
            steps = by_place(found[kind])
            seconds = statistics.median(one["seconds"] for one in found[kind])
            of = {True: 0.0, False: 0.0}
            for ms, is_decode in zip(steps, decodes, strict=len(steps) == len(decodes)):
                of[is_decode] += ms
            rows.append((name, f"{seconds:.3f}", f"{of[True]:.1f}", f"{of[False]:.1f}"))
        return (
            "### kvferry's own engine, with its hooks and without\n\n"
            f"{len(found['hooks'])} such rounds of each in turn, in one process: seconds of a "
            "round (median), and the milliseconds of its steps, each the lower quartile over the "
            "rounds.\n\n"
            + table(("", "seconds", "steps that decode, ms", "steps that prefill, ms"), rows)
        )
    return ""
