"""``kvferry disk``: list, verify and remove the stores on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from kvferry.config import Config
from kvferry.core.quantities import rounded_size
from kvferry.errors import ConfigError, KvferryError, StoreError
from kvferry.tiers.disk.quota import StoreFolder, purge_store, stores_under
from kvferry.tiers.disk.store import verify_store
from kvferry.tools.cli.output import as_json_option, plain_console, table
from kvferry.tools.words import clean, counted

NOT_RIGHT = 1

ROOTS = click.argument(
    "paths", nargs=-1, metavar="[PATH]...", type=click.Path(file_okay=False, path_type=Path)
)


@click.group()
def disk() -> None:
    """List, verify and remove the stores on disk.

    A store is a directory with the blocks of one model, written by one rank, and their index.
    PATH is a store or a directory of stores. Without PATH it is the setting disk (KVFERRY_DISK, or
    the file of KVFERRY_CONFIG).
    """


@disk.command("ls")
@ROOTS
@as_json_option
def list_command(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the stores with model, rank, size, use, and the process that has them open.

    \b
    kvferry disk ls                 the stores of the setting disk
    kvferry disk ls /mnt/nvme       the stores in a directory
    """
    found = _stores(paths)
    if as_json:
        click.echo(json.dumps({"stores": [_plain(each) for each in found]}))
    elif found:
        _show(found)
    else:
        click.echo("There is no store.")


@disk.command()
@ROOTS
@as_json_option
@click.pass_context
def verify(ctx: click.Context, paths: tuple[Path, ...], as_json: bool) -> None:
    """Read every block and compare it with its checksum. Changes nothing.

    A server verifies each block that it reads; this command finds damage earlier. Encrypted stores
    need the key of the settings. A store that a server has open cannot be verified.

    The exit code is 0 if every block of every store is as it was written, else 1.
    """
    rows: list[dict[str, Any]] = []
    key = Config.load().disk_key()
    for store in _stores(paths):
        row: dict[str, Any] = {"store": str(store.path), "sound": False}
        try:
            row["blocks"], row["bad_places"] = verify_store(store.path, key)
            row["sound"] = not row["bad_places"]
            words = f"{row['blocks']:,} blocks, {len(row['bad_places']):,} of them damaged"
        except (KvferryError, OSError) as error:
            row["error"] = str(error)
            words = f"could not be verified: {error}"
        rows.append(row)
        if not as_json:
            click.echo(clean(f"{store.path}: {words}"), err=not row["sound"])
    if as_json:
        click.echo(json.dumps({"stores": rows}))
    if not all(row["sound"] for row in rows):
        ctx.exit(NOT_RIGHT)


@disk.command()
@ROOTS
@click.option("--all", "everything", is_flag=True, help="Remove every store of the setting disk.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@click.pass_context
def purge(
    ctx: click.Context, paths: tuple[Path, ...], everything: bool, yes: bool, as_json: bool
) -> None:
    """Remove stores, for good.

    Name them, or give --all. A store that a server has open is refused after the others are
    removed. An SSD may still hold the bytes of a removed store: encrypt stores against that.

    \b
    kvferry disk purge /mnt/nvme/kvferry-1f0c...-r0of1-d0of1
    kvferry disk purge --all --yes

    The exit code is 0 if all named stores are gone, else 1.
    """
    if not paths and not everything:
        raise click.UsageError("name stores, or give --all", ctx)
    stores = _stores(paths)
    if not stores:
        click.echo(json.dumps({"stores": []}) if as_json else "There is no store to remove.")
        return
    if not yes:
        for store in stores:
            click.echo(str(store.path), err=True)
        size = rounded_size(sum(store.num_bytes for store in stores))
        click.confirm(f"Remove {counted(len(stores), 'store')}, {size}?", abort=True, err=True)
    rows = []
    for store in stores:
        try:
            row = {"store": str(store.path), "gone": True, "words": purge_store(store.path)}
        except (StoreError, OSError) as error:
            row = {"store": str(store.path), "gone": False, "words": f"Not removed: {error}"}
        rows.append(row)
        if not as_json:
            click.echo(row["words"], err=not row["gone"])
    if as_json:
        click.echo(json.dumps({"stores": rows}))
    if not all(row["gone"] for row in rows):
        ctx.exit(NOT_RIGHT)


def _stores(paths: Sequence[Path]) -> list[StoreFolder]:
    """Return the named stores and all stores in the named directories, each once."""
    named = paths or [Path(directory) for directory in Config.load().disk]
    if not named:
        raise ConfigError(
            "no directory is named: give one, or set disk (KVFERRY_DISK, or the file that "
            "KVFERRY_CONFIG names)"
        )
    found: dict[Path, StoreFolder] = {}
    for path in map(Path.absolute, named):
        if paths and not path.exists():
            raise StoreError(f"there is no {path}")
        here = [folder for folder in stores_under(path.parent) if folder.path == path]
        found |= {folder.path: folder for folder in here or stores_under(path)}
    return list(found.values())


def _plain(folder: StoreFolder) -> dict[str, Any]:
    values: dict[str, Any] = {
        "path": str(folder.path),
        "bytes": folder.num_bytes,
        "last_used": folder.last_used,
        "open_in": folder.holder,
        "trouble": folder.trouble,
    }
    if folder.superblock is not None:
        mine = folder.superblock.identity
        values |= {
            "label": mine.label,
            "places": folder.superblock.num_places,
            "block_bytes": mine.block_bytes,
            "rank": mine.rank,
            "num_ranks": mine.num_ranks,
            "drive": mine.stripe,
            "num_drives": mine.num_stripes,
            "encrypted": mine.is_sealed,
        }
    return values


def _show(found: Sequence[StoreFolder]) -> None:
    console = plain_console()
    names = ("Model", "Rank", "Drive", "Size", "Places", "Last used", "Store", "State")
    left = [name for name in names if name not in ("Size", "Places")]
    for root, here in groupby(found, lambda folder: folder.path.parent):
        console.print(Text(clean(root), style="bold"))
        console.print(table(names, map(_cells, here), left=left, style="bold dim"))
    size = sum(folder.num_bytes for folder in found)
    console.print(f"{counted(len(found), 'store')}, {rounded_size(size)}")


def _cells(folder: StoreFolder) -> tuple[str, ...]:
    block = folder.superblock
    label = rank = drive = places = "?"
    state = f"open in {folder.holder}" if folder.holder else "closed"
    if block is not None:
        mine = block.identity
        label = mine.label or "(no name)"
        rank = f"{mine.rank + 1} of {mine.num_ranks}"
        drive = f"{mine.stripe + 1} of {mine.num_stripes}"
        places = f"{block.num_places:,}"
        state += ", encrypted" * mine.is_sealed
    if folder.trouble:
        state = f"cannot be used: {folder.trouble}"
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.last_used))
    return label, rank, drive, rounded_size(folder.num_bytes), places, used, folder.path.name, state
