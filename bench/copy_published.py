"""The copy paths beside a published design, rebuilt: ``kvferry bench copy`` with one more column.

Timed in the same run, by the same rig, on the same memory; what the design does is said in
``designs/published.py``. A minute or two on an otherwise idle GPU.

Needs an NVIDIA GPU, torch and Triton; exits with 77 without.

    python bench/copy_published.py --report copy.md --plot copy.svg --json copy.json
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from kvferry.errors import DriverError
from kvferry.tools.cli.bench_copy import plot, report
from kvferry.tools.cli.output import show
from kvferry.transfer.bench import FULL, QUICK, BenchResult, Effort
from kvferry.transfer.driver.cuda import CudaDriver

SKIPPED = 77


def main() -> int:
    parser = argparse.ArgumentParser(description="The copy paths beside a published design.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--device", type=int, default=0, help="which GPU")
    for kind in ("json", "report", "plot"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the {kind}")
    args = parser.parse_args()
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    try:
        driver = CudaDriver.open(args.device)
    except (OSError, DriverError) as error:
        print(f"no NVIDIA GPU here: {error}")
        return SKIPPED
    if missing:
        print(f"needs {' and '.join(missing)}")
        return SKIPPED
    try:
        result = run(driver, QUICK if args.quick else FULL, " ".join(["python", *sys.argv]))
    finally:
        show("")
        driver.close()
    data = result.to_json()
    print(report(data))
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    if args.report is not None:
        args.report.write_text(report(data))
    if args.plot is not None:
        args.plot.write_text(plot(data))
    return 0


def run(driver: CudaDriver, effort: Effort, command: str) -> BenchResult:
    # Imported here: they need torch and Triton, and their absence has been told by now.
    from designs.published import PublishedPath
    from kvferry.transfer.bench import CopyBenchmark

    with driver.current():
        published = PublishedPath(driver)
        benchmark = CopyBenchmark(driver, effort, show, designs={"published": published})
        try:
            result = benchmark.run(command)
        finally:
            benchmark.close()
            published.close()
    result.designs["published"] = PublishedPath.HOW
    return result


if __name__ == "__main__":
    sys.exit(main())
