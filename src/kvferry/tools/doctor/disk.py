"""The checks of the tiers below host memory: the disk, its drives and key, and other tiers."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.config import Config
from kvferry.core.quantities import MiB, rounded_size
from kvferry.errors import ConfigError
from kvferry.settings.tiers import DISK, KEY_ENV, REMOTE, DiskSettings, TierSpec
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.movers import open_tier
from kvferry.tools.doctor.drive import MOST_BYTES, DriveFacts, file_system, nearest_directory
from kvferry.tools.doctor.machine import Environment, Finding, fail, ok, warn

_FAR = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse.sshfs", "lustre", "glusterfs")
_MEMORY = ("is memory: its blocks take memory and end with the machine", "name a drive's directory")
_UNFIT = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": (
        "is the container's own layer: slow, and gone with the container",
        "mount a volume: docker run -v, or a Kubernetes volume as in deploy/kubernetes",
    ),
    **dict.fromkeys(
        _FAR,
        (
            "is on another machine: its locks and syncs may be unreliable",
            "name a directory on a local drive",
        ),
    ),
}
"""File systems that are unfit: why, and the remedy."""

_SLOW = 500 * MiB
"""Bytes per second. Computing is often faster than a slower drive."""

_BLOCK_BYTES = 4096
"""A small block. Only the engine knows its own size."""

_CLOSE_SECONDS = 1.0


def check_disk(env: Environment, config: Config) -> Iterator[Finding]:
    """Check each directory of the disk, its key, and its processes."""
    settings = config.disk_settings
    if settings is None:
        return
    for directory in settings.directories:
        yield from _directory(env, settings, directory)
    yield _key(env, settings)
    yield _packages(env)
    yield _processes(env)


def _directory(env: Environment, settings: DiskSettings, directory: str) -> Iterator[Finding]:
    name = f"disk {directory}"
    here = nearest_directory(directory)
    kind = file_system(here, env.read("/proc/self/mountinfo") or "")
    yield _kind(name, directory, here, kind)
    room = env.room(here)
    yield _space(name, settings, room)
    if room is None or room[1] < settings.keep_free + 2 * MOST_BYTES:
        return
    yield _speed(name, here, env.drive(here))


def _kind(name: str, directory: str, here: str, kind: str) -> Finding:
    kind = kind or "a file system that the kernel does not name"
    if here != directory:
        return warn(
            name,
            f"it does not exist yet; it would be made in {here}, on {kind}",
            "mount the drive and make the directory, or do nothing if this place is right",
        )
    if kind in _UNFIT:
        words, remedy = _UNFIT[kind]
        return warn(name, f"{kind} {words}", remedy)
    return ok(name, f"on {kind}")


def _space(name: str, settings: DiskSettings, room: tuple[int, int] | None) -> Finding:
    name = f"{name}: space"
    if room is None:
        return fail(name, "it cannot be read", "make the directory readable")
    share = settings.size // len(settings.directories)
    usable = room[1] - settings.keep_free
    words = f"{rounded_size(room[1])} free of {rounded_size(room[0])}"
    if usable <= 0:
        return fail(
            name,
            f"{words}, and disk_keep_free is {rounded_size(settings.keep_free)}: no more blocks "
            "can be stored here",
            "make room, or lower disk_keep_free",
        )
    if usable < share:
        return warn(
            name,
            f"{words}; disk_size is {rounded_size(share)} here, disk_keep_free "
            f"{rounded_size(settings.keep_free)}",
            f"fine if kvferry's own blocks take the rest; else set disk_size to "
            f"{rounded_size(usable * len(settings.directories))} or less",
        )
    return ok(name, f"{words}; up to {rounded_size(share)} will be used")


def _speed(name: str, here: str, facts: DriveFacts) -> Finding:
    name = f"{name}: drive"
    if facts.error:
        return fail(
            name,
            f"a file in {here} could not be written and read: {facts.error}",
            "let the user of the engine write there; check the drive (dmesg)",
        )
    assert facts.read_rate is not None
    assert facts.write_rate is not None
    words = (
        f"{rounded_size(int(facts.read_rate))}/s read, {rounded_size(int(facts.write_rate))}/s "
        "written"
    )
    if not facts.is_direct:
        return warn(
            name,
            f"{words}, through the page cache: this file system has no direct I/O",
            "fine for a trial; to serve, use ext4 or xfs on a local drive",
        )
    if facts.read_rate < _SLOW:
        return warn(
            name,
            f"{words}, past the page cache",
            "a GPU computes most prompts faster than such a drive reads them: use NVMe",
        )
    return ok(name, f"{words}, past the page cache")


def _key(env: Environment, settings: DiskSettings) -> Finding:
    try:
        key = settings.read_key(env.env)
    except ConfigError as error:
        return fail("disk encryption", str(error), "correct the key, or leave it out")
    if key is None:
        return ok("disk encryption", "off: prompts can be read from the drive")
    if env.package("cryptography") is None:
        return fail(
            "disk encryption",
            "a key is given, but the package cryptography is not installed",
            "pip install 'kvferry[disk-encryption]'",
        )
    where = "disk_key_file" if settings.key_file is not None else KEY_ENV
    return ok("disk encryption", f"on, AES-GCM with the key of {where}")


def _packages(env: Environment) -> Finding:
    if env.package("xxhash") is None:
        return fail(
            "disk checksums", "the package xxhash is not installed", "pip install 'kvferry[disk]'"
        )
    return ok("disk checksums", "xxh3-128")


def _processes(env: Environment) -> Finding:
    way = env.reach()
    if not way:
        return fail(
            "disk processes",
            "a process that the engine starts cannot reach its memory, so no block can be moved",
            "in a container, allow process_vm_readv and process_vm_writev (docker run "
            "--cap-add SYS_PTRACE), or mount /proc without hidepid",
        )
    if way != "process_vm":
        return warn(
            "disk processes",
            f"the engine's memory is reached through {way}: slower than process_vm_readv, which "
            "is forbidden here",
            "in a container, docker run --cap-add SYS_PTRACE, or a seccomp profile that allows it",
        )
    return ok("disk processes", "they reach the engine's memory by process_vm_readv")


def check_tiers(config: Config) -> Iterator[Finding]:
    """Open each tier that the settings name, and close it again."""
    for spec in config.all_tiers:
        if spec.kind != DISK:
            yield _check(spec, config)


def _check(spec: TierSpec, config: Config) -> Finding:
    name = f"tier {spec.name}"
    setup = TierSetup(
        spec.name,
        _BLOCK_BYTES,
        options=spec.options,
        shared_namespace=bytes(32),  # no server uses it
        remote=config.remote_settings,
    )
    setting = REMOTE if spec.kind == REMOTE else "tiers"
    try:
        tier = open_tier(spec, setup)
    except ConfigError as error:
        return fail(name, str(error), f"correct the setting {setting}, or leave the tier out")
    ailment, num_places = tier.ailment, tier.num_places
    tier.close(_CLOSE_SECONDS)
    if ailment:
        return warn(name, f"{spec}: cannot be used now: {ailment}", "repair it, or leave it out")
    kind = "finds blocks by their keys" if num_places is None else "has places for blocks"
    return ok(name, f"{spec}: can be opened, {kind}")
