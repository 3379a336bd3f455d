"""How soon host memory can serve, and what making it ready costs the model and the copies.

    PYTHONPATH=src python bench/host_memory.py --size 32GiB --json host-memory.json

Needs a GPU and torch (for the model, and to compare with its pinning); exits with 77 without.
Memory the machine never used before is slower to get where a hypervisor has yet to back it, so the
first growth after boot is its own line; the later ones take pages that were used before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvferry
from _copy_rig import pcie_link
from host_memories.table import table
from kvferry.core.quantities import GiB, MiB, parse_size
from kvferry.errors import DriverError
from kvferry.hostmem.memory import NUM_THREADS, HostMemory
from kvferry.hostmem.slots import Bytes, PrivateMemory, populate
from kvferry.transfer.driver import Driver, Priority

SLOT_BYTES = 2 * MiB
MATMUL = 8192
BESIDE_BYTES = 4 * GiB
PART_BYTES = 64 * MiB
GRAPH_ROWS = 64
GRAPH_PRODUCTS = 20
SMALL_LAUNCHES = 30
PYTHON_STEPS = 5000
SKIPPED = 77


class Bench:
    """Owns the card for one run: driver, one copy stream, and the figures so far."""

    def __init__(self, driver: Driver, size: int, torch_size: int, seconds: float) -> None:
        import torch

        self.torch = torch
        self.driver = driver
        self.size = size
        self.torch_size = torch_size
        self.seconds = seconds
        self.figures: dict[str, Any] = {}
        with driver.current():
            self.stream = driver.create_stream(Priority.HIGH)
        self.square = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.square)
        self.graph: Any = None
        self.model_stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def host(self, *, busy: bool = False, num_threads: int = NUM_THREADS) -> HostMemory:
        return HostMemory(
            self.size,
            SLOT_BYTES,
            registrar=self.driver,
            pin="required",
            busy=lambda: busy,
            pci_bus_id=self.driver.identity().pci_bus_id,
            num_threads=num_threads,
        )

    # -- how soon -------------------------------------------------------------------------------

    def grow(self, name: str, num_threads: int = NUM_THREADS) -> HostMemory:
        began = time.perf_counter()
        host = self.host(num_threads=num_threads)
        first = time.perf_counter() - began
        host.wait()
        whole = time.perf_counter() - began
        stats = host.stats()
        self.figures[name] = {
            "first_seconds": first,
            "first_bytes": min(host.chunk_bytes, self.size),
            "whole_seconds": whole,
            "gb_per_s": stats.ready_bytes / whole / 1e9,
            "asked_bytes": self.size,
            "pinned_bytes": stats.pinned_bytes,
            "chunk_bytes": host.chunk_bytes,
            "num_threads": num_threads,
            "stats": str(stats),
        }
        self.say(name)
        return host

    def close(self, name: str, host: HostMemory) -> None:
        began = time.perf_counter()
        host.close()
        self.figures[name]["close_seconds"] = time.perf_counter() - began

    def beside_fresh(self) -> None:
        """What else fresh memory can be had by, in turns: the bare calls in loops, and torch.

        The machine's limit, then, and the peer's way. Everything is held until the end, so that
        each gets pages nobody had before.
        """
        held: list[Any] = []
        rates: dict[str, list[float]] = {"bare_calls": [], "torch": []}
        for _ in range(2):
            memory = PrivateMemory(BESIDE_BYTES).bytes
            began = time.perf_counter()
            registered = make_ready(memory, self.driver)
            rates["bare_calls"].append(BESIDE_BYTES / (time.perf_counter() - began) / 1e9)
            held.append((memory, registered))
            began = time.perf_counter()
            pinned = self.torch.empty(BESIDE_BYTES, dtype=self.torch.uint8, pin_memory=True)
            rates["torch"].append(BESIDE_BYTES / (time.perf_counter() - began) / 1e9)
            held.append((pinned, []))
        for _, registered in held:
            for address in registered:
                self.driver.unregister_host(address)
        self.figures["beside_fresh"] = {"bytes_each": BESIDE_BYTES, "gb_per_s": rates}
        self.say("beside_fresh")

    def torch_pinning(self) -> None:
        began = time.perf_counter()
        memory = self.torch.empty(self.torch_size, dtype=self.torch.uint8, pin_memory=True)
        seconds = time.perf_counter() - began
        self.figures["torch_pinning"] = {
            "bytes": self.torch_size,
            "seconds": seconds,
            "gb_per_s": self.torch_size / seconds / 1e9,
            "seconds_for_asked": seconds * self.size / self.torch_size,
        }
        del memory
        self.say("torch_pinning")

    # -- copies while it grows ------------------------------------------------------------------

    def copy_rate(self, host: HostMemory, go_on: Callable[[], bool]) -> dict[str, Any]:
        """Copy chunks to the host and back for a while; every byte that came back is compared.

        Only the copies are timed, by the device's clock.
        """
        torch, driver = self.torch, self.driver
        size = host.chunk_bytes
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        back = torch.empty_like(source)
        seconds: dict[str, list[float]] = {"d2h": [], "h2d": []}
        wrong = count = 0
        with driver.current():
            begin, end = (driver.create_event(timing=True) for _ in range(2))
            while go_on() or count < 4:
                ready = host.ready_slots // host.tier.chunks.slots_per_chunk
                place = host.tier.address + (count * 7919 % ready) * size
                source.add_(1)
                back.zero_()
                torch.cuda.synchronize()
                for way, dst, src in (
                    ("d2h", place, source.data_ptr()),
                    ("h2d", back.data_ptr(), place),
                ):
                    driver.record_event(begin, self.stream)
                    driver.copy_async(dst, src, size, self.stream)
                    driver.record_event(end, self.stream)
                    driver.synchronize_stream(self.stream)
                    seconds[way].append(driver.elapsed_seconds(begin, end))
                wrong += int((source != back).sum())
                count += 1
            driver.destroy_event(begin)
            driver.destroy_event(end)
        rates = {way: size * len(took) / sum(took) / 1e9 for way, took in seconds.items()}
        return {**rates, "copies": 2 * count, "bytes_compared": count * size, "wrong_bytes": wrong}

    # -- the model while it grows ---------------------------------------------------------------

    def model_rate(self, go_on: Callable[[], bool]) -> dict[str, Any]:
        """Products per second with a queue kept short, so that a held-up launch shows."""
        torch = self.torch
        events = [torch.cuda.Event() for _ in range(4)]
        count = 0
        with torch.cuda.stream(self.model_stream):
            torch.cuda.synchronize()
            began = time.perf_counter()
            while go_on() or count < 8:
                event = events[count % len(events)]
                if count >= len(events):
                    event.synchronize()
                torch.mm(self.square, self.square, out=self.product)
                event.record()
                count += 1
            torch.cuda.synchronize()
        return {"products_per_s": count / (time.perf_counter() - began), "products": count}

    def model_while_growing(self) -> None:
        """Products before, during (slowed for a busy model, and not) and after a growth."""
        self.model_rate(self.timer())  # libraries load, clocks rise
        result = {"before": self.model_rate(self.timer())}
        result |= self.while_growing(lambda host, go_on: self.model_rate(go_on))
        result["after"] = self.model_rate(self.timer())
        self.figures["model"] = result
        self.say("model")

    def step_times(self, go_on: Callable[[], bool]) -> dict[str, Any]:
        """Steps as a server decodes: one graph, small launches around it, a little Python."""
        torch = self.torch
        graph, small = self.step_graph()
        seconds: list[float] = []
        with torch.cuda.stream(self.model_stream):
            torch.cuda.synchronize()
            while go_on() or len(seconds) < 8:
                began = time.perf_counter()
                graph.replay()
                for _ in range(SMALL_LAUNCHES):
                    small.add_(1)
                sum(range(PYTHON_STEPS))
                self.model_stream.synchronize()
                seconds.append(time.perf_counter() - began)
        seconds.sort()
        return {
            "steps": len(seconds),
            "mean_ms": sum(seconds) / len(seconds) * 1e3,
            "p99_ms": seconds[len(seconds) * 99 // 100] * 1e3,
        }

    def step_graph(self) -> tuple[Any, Any]:
        """About a millisecond of products in one graph, and a small tensor to launch on."""
        torch = self.torch
        if self.graph is None:
            a = self.square[:GRAPH_ROWS].clone()
            out = torch.empty_like(a)
            torch.mm(a, self.square, out=out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_PRODUCTS):
                    torch.mm(a, self.square, out=out)
            self.graph = graph, torch.zeros(1024, device="cuda"), a, out
        return self.graph[0], self.graph[1]

    def steps_while_growing(self) -> None:
        """The same with steps of many launches, which pinning holds back one by one."""
        self.step_times(self.timer())
        result = {"before": self.step_times(self.timer())}
        result |= self.while_growing(lambda host, go_on: self.step_times(go_on))
        result["after"] = self.step_times(self.timer())
        self.figures["steps"] = result
        self.say("steps")

    def copies_while_growing(self) -> None:
        with self.growing(busy=False) as host:
            host.wait()
            result = {"before": self.copy_rate(host, self.timer())}
        self.figures["copies"] = result | self.while_growing(self.copy_rate)
        self.say("copies")

    def while_growing(
        self, measure: Callable[[HostMemory, Callable[[], bool]], dict[str, Any]]
    ) -> dict[str, Any]:
        result = {}
        for mode, busy in (("throttled", True), ("full_speed", False)):
            with self.growing(busy=busy) as host:
                ready, began = host.ready_slots, time.perf_counter()
                result[mode] = measure(host, self.until_grown(host))
                took = time.perf_counter() - began
                grown = (host.ready_slots - ready) * SLOT_BYTES
                result[mode] |= {"growth_gb_per_s": grown / took / 1e9, "seconds": took}
        return result

    def until_grown(self, host: HostMemory) -> Callable[[], bool]:
        in_time = self.timer()
        return lambda: in_time() and not host.wait(0)

    def captures_while_growing(self) -> None:
        """Graphs captured while all threads pin memory: a spoiled capture raises."""
        torch = self.torch
        count = 0
        with self.growing(busy=False) as host:
            go_on = self.until_grown(host)
            while go_on() or count < 4:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    torch.mm(self.square, self.square, out=self.product)
                graph.replay()
                count += 1
            torch.cuda.synchronize()
        self.figures["graph_captures"] = {"captured": count, "spoiled": 0}
        self.say("graph_captures")

    @contextmanager
    def growing(self, *, busy: bool) -> Iterator[HostMemory]:
        host = self.host(busy=busy)
        try:
            yield host
        finally:
            host.close()

    def timer(self) -> Callable[[], bool]:
        end = time.perf_counter() + self.seconds
        return lambda: time.perf_counter() < end

    def say(self, name: str) -> None:
        print(f"{name}: {json.dumps(self.figures[name], default=str)}", flush=True)


def make_ready(memory: Bytes, driver: Driver) -> list[int]:
    """Touch and register in plain loops, a part for each processor; the addresses registered."""
    base = int(memory.ctypes.data)
    threads = len(os.sched_getaffinity(0))

    def one(start: int) -> int:
        populate(memory[start : start + PART_BYTES])
        driver.register_host(base + start, PART_BYTES)
        return base + start

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(0, memory.nbytes, PART_BYTES)))


def run(driver: Driver, size: int, torch_size: int, seconds: float) -> dict[str, Any]:
    bench = Bench(driver, size, torch_size, seconds)
    fresh = bench.grow("fresh_memory")
    bench.beside_fresh()
    bench.close("fresh_memory", fresh)
    bench.close("used_memory", bench.grow("used_memory"))
    bench.model_while_growing()
    bench.steps_while_growing()
    bench.copies_while_growing()
    bench.captures_while_growing()
    bench.torch_pinning()
    return bench.figures


def provenance(driver: Driver, command: str) -> dict[str, Any]:
    import numpy as np
    import torch

    identity = driver.identity()
    uptime = Path("/proc/uptime").read_text().split()[0]
    return {
        "card": identity.name,
        "link": pcie_link(identity.pci_bus_id),
        "cuda_driver": identity.driver_version,
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "seconds_since_boot": float(uptime),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "kvferry": kvferry.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default=32 * GiB)
    parser.add_argument("--torch-size", type=parse_size, default=16 * GiB)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measured stretch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("needs torch")
        return SKIPPED
    try:
        driver = Driver.open()
    except DriverError as error:
        print(f"needs a GPU: {error}")
        return SKIPPED
    about = provenance(driver, " ".join(["python", *sys.argv]))
    print(json.dumps(about), flush=True)
    figures = run(driver, args.size, args.torch_size, args.seconds)
    if args.json is not None:
        args.json.write_text(json.dumps({"provenance": about, "figures": figures}, indent=1) + "\n")
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
