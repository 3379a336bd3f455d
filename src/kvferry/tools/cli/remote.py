"""``kvferry remote``: list and remove kvferry's objects in a shared bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import click
from rich.console import Console

from kvferry.config import Config
from kvferry.core.quantities import parse_seconds, rounded_size
from kvferry.errors import ConfigError, StoreError
from kvferry.settings.tiers import MOONCAKE, RemoteAddress, read_remote
from kvferry.tiers.remote.tier import require_packages
from kvferry.tools.cli.output import as_json_option, plain_console, progress, table
from kvferry.tools.words import counted

_BATCH = 1000
_SHOWN = 12
"""Digits of a namespace in tables, enough to tell namespaces apart."""

ADDRESS = click.argument("address", required=False, metavar="[ADDRESS]")


@dataclass
class NamespaceUse:
    """The objects of one namespace, as ``list_ours`` lists them."""

    namespace: str
    label: str = ""
    objects: list[Any] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.objects)

    def plain(self) -> dict[str, Any]:
        """Return the figures as data for JSON."""
        times = [each.modified for each in self.objects]
        return {
            "namespace": self.namespace,
            "label": self.label,
            "ranks": sorted({each.rank for each in self.objects}),
            "num_ranks": self.objects[-1].num_ranks,
            "objects": len(self.objects),
            "bytes": self.num_bytes,
            "oldest": min(times).isoformat(timespec="minutes"),
            "newest": max(times).isoformat(timespec="minutes"),
        }


@click.group()
def remote() -> None:
    """List and remove what is kept in a shared bucket.

    ADDRESS is one such as s3://BUCKET/PREFIX. Without it, it is the setting remote
    (KVFERRY_REMOTE, or the file of KVFERRY_CONFIG). Credentials are found as the server finds them.
    A Mooncake store cannot be listed: its master evicts by itself.
    """


@remote.command("ls")
@ADDRESS
@as_json_option
def list_command(address: str | None, as_json: bool) -> None:
    """List the models whose blocks are there, with objects, bytes and age.

    A namespace is one model with its revision, dtype and layout. Its name is what the server that
    wrote it calls its model, unless blocks are encrypted.

    \b
    kvferry remote ls                           the setting remote
    kvferry remote ls s3://my-bucket/kv --json
    """
    where = _address(address)
    found = _find(where, lambda modified: True)
    if as_json:
        click.echo(json.dumps({"address": str(where), "namespaces": [f.plain() for f in found]}))
    elif found:
        _show(found, plain_console())
    else:
        click.echo(f"Nothing of kvferry's in {where}.")


@remote.command()
@ADDRESS
@click.option("--all", "everything", is_flag=True, help="Remove everything kvferry has there.")
@click.option("--older-than", metavar="TIME", help="Remove what was written so long ago: 12h, 7d.")
@click.option("--namespace", default="", help="Only of this namespace: the first digits of it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@click.pass_context
def purge(
    ctx: click.Context,
    address: str | None,
    everything: bool,
    older_than: str | None,
    namespace: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove blocks from a bucket, for good. Servers that use it go on and miss these blocks.

    \b
    kvferry remote purge --older-than 7d
    kvferry remote purge --namespace 1f0c22 --all --yes
    """
    if everything == (older_than is not None):
        raise click.UsageError("give either --all or --older-than TIME", ctx)
    where = _address(address)
    age = parse_seconds(older_than, name="--older-than") if older_than is not None else None
    end = None if age is None else datetime.now(timezone.utc) - timedelta(seconds=age)
    found = _find(where, lambda modified: end is None or modified < end)
    found = [each for each in found if each.namespace.startswith(namespace)]
    paths = [one.path for each in found for one in each.objects]
    size = rounded_size(sum(each.num_bytes for each in found))
    what = f"{counted(len(paths), 'object')} ({size})"
    if paths and not yes:
        _show(found, plain_console(stderr=True))
        click.confirm(f"Remove {what} from {where}?", abort=True, err=True)
    with _failing(where), progress("Removing objects"):
        from kvferry.tiers.remote.listing import remove
        from kvferry.tiers.remote.stores import open_bucket

        store = open_bucket(where, os.environ)
        for at in range(0, len(paths), _BATCH):
            remove(store, paths[at : at + _BATCH])
    if as_json:
        click.echo(json.dumps({"address": str(where), "removed": len(paths)}))
    else:
        click.echo(f"Removed {what}." if paths else f"Nothing to remove in {where}.")


def _address(told: str | None) -> RemoteAddress:
    address = read_remote("ADDRESS", told) if told else Config.load().remote
    if address is None:
        raise ConfigError(
            "no address is named: give one such as s3://BUCKET/PREFIX, or set remote "
            "(KVFERRY_REMOTE, or the file that KVFERRY_CONFIG names)"
        )
    if address.kind == MOONCAKE:
        raise ConfigError(
            f"{address}: a Mooncake store cannot be listed. Its master evicts by itself and counts "
            "its objects in its metrics (mooncake_master --metrics_port); restart it to empty it"
        )
    require_packages(address)
    return address


def _find(where: RemoteAddress, wants: Callable[[datetime], bool]) -> list[NamespaceUse]:
    from kvferry.tiers.remote.listing import label_in, list_ours
    from kvferry.tiers.remote.stores import open_bucket

    found = dict[str, NamespaceUse]()
    with _failing(where), progress("Listing objects"):
        store = open_bucket(where, os.environ)
        for page in list_ours(store, f"{where.prefix}/" if where.prefix else ""):
            for each in filter(lambda each: wants(each.modified), page):
                here = found.setdefault(each.namespace, NamespaceUse(each.namespace))
                here.objects.append(each)
                if each.name == "probe" and not here.label:
                    here.label = label_in(store, each.path)
    return sorted(found.values(), key=lambda each: -each.num_bytes)


@contextmanager
def _failing(where: RemoteAddress) -> Iterator[None]:
    from kvferry.tiers.remote.stores import reason_of

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # obstore raises many kinds
        raise StoreError(f"{where}: {reason_of(error)}") from error


def _show(found: list[NamespaceUse], console: Console) -> None:
    names = ("For", "Namespace", "Ranks", "Objects", "Size", "Oldest", "Newest")
    left = [name for name in names if name not in ("Objects", "Size")]
    rows = [
        (
            each["label"] or "(no name)",
            each["namespace"][:_SHOWN],
            f"{len(each['ranks'])} of {each['num_ranks']}",
            f"{each['objects']:,}",
            rounded_size(each["bytes"]),
            each["oldest"],
            each["newest"],
        )
        for each in (one.plain() for one in found)
    ]
    console.print(table(names, rows, left=left, style="bold dim"))
    size = rounded_size(sum(each.num_bytes for each in found))
    console.print(f"{counted(sum(len(each.objects) for each in found), 'object')}, {size} (UTC)")
