"""What was measured of host memory, beside what it must be, as a table."""

from __future__ import annotations

from typing import Any

from kvferry.core.quantities import GiB


def table(figures: dict[str, Any]) -> str:
    fresh, used = figures["fresh_memory"], figures["used_memory"]
    model, copies, torch = figures["model"], figures["copies"], figures["torch_pinning"]
    beside = figures["beside_fresh"]["gb_per_s"]
    usual = max(model[when]["products_per_s"] for when in ("before", "after"))
    loss = {mode: 1 - model[mode]["products_per_s"] / usual for mode in ("throttled", "full_speed")}
    kept = {
        mode: min(copies[mode][way] / copies["before"][way] for way in ("d2h", "h2d"))
        for mode in ("throttled", "full_speed")
    }
    steps = figures["steps"]
    mean, p99 = (
        {when: steps[when][what] for when in ("before", "throttled", "full_speed")}
        for what in ("mean_ms", "p99_ms")
    )
    compared = sum(copies[mode]["bytes_compared"] for mode in kept)
    wrong = sum(copies[mode]["wrong_bytes"] for mode in kept)
    rows = [
        ("first slots serve after, fresh memory", f"{fresh['first_seconds']:.3f} s", "0.3 s"),
        ("first slots serve after, used memory", f"{used['first_seconds']:.3f} s", "0.3 s"),
        (
            "torch pinning, before anything serves",
            f"{torch['seconds']:.1f} s for {torch['bytes'] / GiB:.0f} GiB "
            f"({torch['gb_per_s']:.1f} GB/s)",
            "",
        ),
        ("whole pool, fresh memory", f"{fresh['gb_per_s']:.1f} GB/s", "4"),
        ("  right after, the bare calls in loops", f"{rates(beside['bare_calls'])} GB/s", ""),
        ("  right after, torch", f"{rates(beside['torch'])} GB/s", ""),
        ("whole pool, used memory", f"{used['gb_per_s']:.1f} GB/s", "15"),
        (
            "bytes pinned more than asked",
            f"{fresh['pinned_bytes'] - fresh['asked_bytes']}",
            f"one chunk ({fresh['chunk_bytes']})",
        ),
        ("copies during growth, of normal speed", f"{kept['throttled']:.2f}", "0.9"),
        ("  growth not slowed for the model", f"{kept['full_speed']:.2f}", ""),
        ("wrong bytes", f"{wrong} of {compared / 1e9:.0f} GB compared", "0"),
        ("model loses during growth", f"{loss['throttled']:.1%}", "3%"),
        ("  growth not slowed for the model", f"{loss['full_speed']:.1%}", ""),
        ("  growth then", f"{model['throttled']['growth_gb_per_s']:.1f} GB/s", ""),
        (
            "decode-like steps during growth, of usual",
            f"{mean['throttled'] / mean['before']:.3f}",
            "",
        ),
        ("  p99, usual and then", f"{p99['before']:.2f} and {p99['throttled']:.2f} ms", ""),
        ("  growth not slowed for the model", f"{mean['full_speed'] / mean['before']:.2f}", ""),
        ("  growth then", f"{steps['throttled']['growth_gb_per_s']:.1f} GB/s", ""),
        ("graphs captured during growth", f"{figures['graph_captures']['captured']}", ""),
        ("given back in", f"{used['close_seconds']:.2f} s", ""),
    ]
    lines = ["| what | measured | must |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {is_} | {must} |" for what, is_, must in rows)])


def rates(gb_per_s: list[float]) -> str:
    return " and ".join(f"{rate:.1f}" for rate in gb_per_s)
