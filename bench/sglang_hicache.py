"""SGLang's HiCache alone, with its own file storage, and with kvferry below, on one card.

On a GPU machine, with a folder BUNDLE that has smoke.py, env.sh, unpack.py and p1_core.tar:

    python3 BUNDLE/unpack.py --target /tmp/sglang BUNDLE/p1_core.tar && PYTHONPATH=src \
        python3 bench/sglang_hicache.py --smoke BUNDLE --target /tmp/sglang --store /tmp/store \
        --json $OUT/sglang.json --report $OUT/sglang.md

Each case is an engine in a process of its own, with the same host memory and random weights:

  fill      new prompts, one after the other, until their KV is --factor times host memory
  working   the same prompts in random order, --rounds times: most are no longer in host memory
  restart   a second engine over the same storage is sent the prompts that were sent last

Before the last two the page cache is dropped where that is allowed (to root): SGLang's files are
read through it, kvferry's past it. Times are those to the first token. --case runs one case alone;
a case takes about three minutes.
On a CPU, to try the script (its figures mean nothing), with SGLang installed and stand-ins for its
kernels on PYTHONPATH:

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=src:CPU python bench/sglang_hicache.py --smoke BUNDLE \
        --store /tmp/store --shape tiny --attn torch_native --io direct --prompt-len 480 \
        --host-gb 1 --chunk 1024 --prompts 6 --option 'device="cpu"' \
        --option 'context_length=4096' --option 'disable_overlap_schedule=true'
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _tables import table

CASES = {"hicache": "hicache", "file": "file", "kvferry": "own"}
"""Each case, and what smoke.py calls it."""
SECONDS = 420
GB = 10**9

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", type=Path, required=True, help="the folder with smoke.py")
    parser.add_argument("--target", type=Path, help="an unpacked bundle; else SGLang as installed")
    parser.add_argument("--store", type=Path, required=True, help="an empty folder on the drive")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--factor", type=float, default=4.0, help="prompts over host memory (4)")
    parser.add_argument("--rounds", type=int, default=1, help="of the working set (1)")
    parser.add_argument("--prompts", type=int, default=0, help="instead of what --factor asks for")
    parser.add_argument("--restart", type=int, default=5, help="prompts after the restart (5)")
    parser.add_argument("--prompt-len", type=int, default=16_000, metavar="TOKENS")
    parser.add_argument("--host-gb", type=int, default=8, help="host memory, in GB (8)")
    parser.add_argument("--disk-size", default="", help="kvferry's bound (1.3 times the prompts)")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="more of kvferry's, as JSON"
    )
    parser.add_argument("--shape", default="qwen7b", help="smoke.py's name of a model")
    parser.add_argument("--attn", default="fa3", help="attention back end (fa3)")
    parser.add_argument("--io", default="kernel", choices=("kernel", "direct"), help="HiCache's")
    parser.add_argument("--layout", default="", help="host memory's, with --io kernel")
    parser.add_argument("--page", type=int, default=64, help="tokens of a page (64)")
    parser.add_argument("--chunk", type=int, default=8192, help="chunked_prefill_size")
    parser.add_argument("--prefetch", default="wait_complete", help="SGLang's prefetch policy")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--rest", type=float, default=3.0, help="quiet seconds before a restart")
    parser.add_argument("--log", default="warning", help="SGLang's log level")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.smoke, args.store = args.smoke.resolve(), args.store.resolve()
    args.target = args.target and args.target.resolve()
    return args


def main() -> int:
    args = parse()
    if args.child:
        run_case(args, args.case[-1])
    results = {case: in_child(args, case) for case in args.case or CASES}
    text = report(results)
    print(text)
    for path, content in ((args.json, json.dumps(results, indent=1)), (args.report, text)):
        if path is not None:
            path.write_text(content)
    return int(any("error" in result for result in results.values()))


def in_child(args: argparse.Namespace, case: str) -> Result:
    """A case in a process group of its own; nothing of it is left behind, nor on the drive."""
    folder = args.store / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-u", *sys.argv, "--case", case, "--child"]
    if args.target is not None:
        source = 'source "$0" "$1" && shift && exec "$@"'
        command = ["bash", "-c", source, str(args.smoke / "env.sh"), str(args.target), *command]
    env = {**os.environ, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    result_file = folder.with_suffix(".json")
    result_file.unlink(missing_ok=True)
    process = subprocess.Popen(command, start_new_session=True, env=env)
    try:
        ending = f"it ended with {process.wait(SECONDS)}"
    except subprocess.TimeoutExpired:
        ending = f"it took longer than {SECONDS} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    if not result_file.exists():
        return {"error": ending}
    return json.loads(result_file.read_text())


def run_case(args: argparse.Namespace, case: str) -> None:
    """Never returns: leaves without the interpreter's teardown, which SGLang can hang in."""
    sys.path.insert(0, str(args.smoke))
    smoke = importlib.import_module("smoke")
    shape = smoke.SHAPES[args.shape]
    token_bytes = 2 * shape["l"] * shape["kv"] * shape["d"] * 2
    prompt_bytes = args.prompt_len * token_bytes
    count = args.prompts or int(args.factor * args.host_gb * GB / prompt_bytes)
    folder = args.store / case
    disk_size = args.disk_size or f"{int(1.3 * count * prompt_bytes) + (256 << 20)}B"
    backend = {
        "backend_name": "kvferry",
        "module_path": "kvferry.connectors.sglang.storage",
        "class_name": "KvferryStorage",
        "interface_v1": 1,
        "revision": "random weights of seed 0",
        "disk": str(folder),
        "disk_size": disk_size,
        "disk_keep_free": "1GiB",
        **args.settings,
    }
    told = argparse.Namespace(
        **vars(args)
        | {
            "target": args.target or args.store,
            "backend": backend,
            "gpu_tokens": int(2.6 * args.prompt_len) // args.page * args.page,
            "mem_fraction": 0.5,
            "graphs": False,
            "write_policy": "write_through",
        }
    )
    options = smoke.engine_options(told, CASES[case], args.io)
    started = time.monotonic()
    bench = start(smoke, options, shape["v"], args)
    result: Result = {
        "prompts": count,
        "prompt_tokens": args.prompt_len,
        "prompt_MB": round(prompt_bytes / 1e6, 1),
        "host_GB": args.host_gb,
        "start_s": round(time.monotonic() - started, 1),
        **smoke.server_facts(bench.engine),
    }
    prompts = [bench.prompt(args.prompt_len) for _ in range(count)]
    cold = note(result, "fill", [bench.send(prompt) for prompt in prompts])
    result["page_cache_dropped"] = drop_page_cache()
    chooser, order = random.Random(1), []
    for _ in range(args.rounds):
        order += chooser.sample(range(count), count)
    note(result, "working", [bench.send(prompts[at]) for at in order], [cold[at] for at in order])
    last = list(dict.fromkeys(reversed(order or range(count))))[: args.restart]
    result["rest_s"] = rest(bench, folder, args.rest)
    bench.engine.shutdown()
    time.sleep(2)
    result["store_GB"] = round(allocated(folder) / 1e9, 2)
    drop_page_cache()
    bench = start(smoke, options, shape["v"], args)
    note(result, "restart", [bench.send(prompts[at]) for at in last], [cold[at] for at in last])
    folder.with_suffix(".json").write_text(json.dumps(result, default=str))
    bench.engine.shutdown()
    os._exit(0)


def start(smoke: Any, options: Result, vocabulary: int, args: argparse.Namespace) -> Any:
    """An engine that has compiled what it compiles at its first requests."""
    bench = smoke.Bench(options, vocabulary)
    bench.rng.seed(time.time_ns())  # prompts of its own
    for length in (args.prompt_len, args.prompt_len, 64):
        bench.send(bench.prompt(length))
    bench.rng.seed(0)
    return bench


def note(
    result: Result, name: str, answers: list[Result], cold: list[Result] | None = None
) -> list[Result]:
    """Write down some answers' times, and where their prompts came from."""
    times = [answer["ms"] for answer in answers]
    found: dict[str, int] = {}
    for answer in answers:
        for place, tokens in answer["from"].items():
            found[place] = found.get(place, 0) + tokens
    result[name] = {
        "median_ms": round(statistics.median(times), 1),
        "mean_ms": round(statistics.mean(times), 1),
        "all_ms": times,
        "found_share": round(
            sum(a["cached"] for a in answers) / (len(answers) * result["prompt_tokens"]), 3
        ),
        "found_in": found,
    }
    if cold is not None:
        same = [a["tokens"] == b["tokens"] for a, b in zip(answers, cold, strict=True)]
        result[name]["same_answers"] = f"{sum(same)} of {len(same)}"
    return answers


def rest(bench: Any, folder: Path, seconds: float) -> float:
    """Wait until the storage has not been written for so long; returns how long that took."""
    bench.settle()
    began = time.monotonic()
    while time.monotonic() < began + 90:
        time.sleep(seconds / 4)
        written = [path.stat().st_mtime for path in folder.rglob("*") if path.is_file()]
        if time.time() - max(written, default=0.0) > seconds:
            break
    return round(time.monotonic() - began, 1)


def drop_page_cache() -> bool:
    """What was written is read from the drive from now on, as on a machine with less memory."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def allocated(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def report(results: dict[str, Result]) -> str:
    """The table of all cases."""
    columns = ["storage below host memory"]
    for name in ("fill", "working set", "restart"):
        columns += [f"{name}, ms", "found"] if name != "fill" else [f"{name}, ms"]
    rows = []
    for case, result in results.items():
        if "error" in result:
            rows.append((case, result["error"], "", "", "", ""))
            continue
        working, again = result["working"], result["restart"]
        rows.append(
            (
                {"hicache": "none", "file": "SGLang's file"}.get(case, case),
                f"{result['fill']['median_ms']:,.0f}",
                f"{working['median_ms']:,.0f} (mean {working['mean_ms']:,.0f})",
                f"{working['found_share']:.0%}",
                f"{again['median_ms']:,.0f}",
                f"{again['found_share']:.0%}",
            )
        )
    return table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
