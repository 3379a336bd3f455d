"""``kvferry bench copy``: every path, both ways, against one large copy."""

from __future__ import annotations

from pathlib import Path

import click

from kvferry.cli.bench_copy_plot import plot
from kvferry.cli.bench_copy_tables import report
from kvferry.cli.card import open_card
from kvferry.cli.json_output import is_stdout, json_option, put
from kvferry.cli.progress import show


@click.command("copy")
@json_option
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write a plot as SVG.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write the tables as Markdown.",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and repeats.")
@click.option("--device", default=0, show_default=True, help="Which GPU.")
def bench_copy(
    json_file: Path | None,
    plot_file: Path | None,
    report_file: Path | None,
    quick: bool,
    device: int,
) -> None:
    """Copy blocks each way, by every path: a minute or two on an otherwise idle GPU.

    Paths are compared with one large copy, the most the link can do. A published design is timed
    beside them by a script of the source tree: bench/copy_published.py.
    """
    driver = open_card("kvferry bench copy", device)
    # Imported here: it needs torch, and the message above must come before its absence.
    from kvferry.device.bench.effort import FULL, QUICK
    from kvferry.device.bench.run import CopyBenchmark

    command = " ".join(["kvferry bench copy", *(["--quick"] if quick else [])])
    try:
        with driver.current():
            benchmark = CopyBenchmark(driver, QUICK if quick else FULL, show)
            try:
                result = benchmark.run(command)
            finally:
                benchmark.close()
    finally:
        show("")
        driver.close()
    data = result.to_json()
    text = report(data)
    click.echo(text, err=is_stdout(json_file))
    put(data, json_file, indent=1)
    if plot_file is not None:
        plot_file.write_text(plot(data))
    if report_file is not None:
        report_file.write_text(text)
