"""The findings of the checks, and the machine behind one interface, so that a test can fake it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata

from kvferry.config import Config
from kvferry.core.quantities import MiB
from kvferry.hostmem.limits import Machine
from kvferry.tools.doctor.drive import DriveFacts, look_at_drive
from kvferry.transfer.driver import BatchForm, DeviceIdentity, Driver, Priority
from kvferry.transfer.planner.profile import has_profile

_WAKE_BYTES = 32 * MiB
_WAKE_COPIES = 24


class Grade(Enum):
    """The weight of a finding."""

    OK = "ok"
    WARN = "warn"  # it works, but slower or with less than it could
    FAIL = "fail"  # it will not work as configured


@dataclass(frozen=True)
class Finding:
    """One line of the report. A finding that is not ok has a remedy."""

    name: str
    grade: Grade
    words: str
    remedy: str = ""


def ok(name: str, words: str) -> Finding:
    return Finding(name, Grade.OK, words)


def warn(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.WARN, words, remedy)


def fail(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.FAIL, words, remedy)


@dataclass(frozen=True)
class Gpu:
    """One card. ``speed`` and ``width`` are the link's under load, None if a guest hides them."""

    identity: DeviceIdentity
    batch_form: BatchForm
    speed: str | None = None
    width: str | None = None
    max_speed: str | None = None
    max_width: str | None = None


def look_at_gpu(device: int) -> Gpu:
    """Open the driver, wake the link with a few copies, and read its speed."""
    driver = Driver.open(device)
    try:
        identity = driver.identity()
        # The driver may write the domain with eight digits, the kernel uses four.
        domain, _, rest = identity.pci_bus_id.lower().partition(":")
        folder = f"/sys/bus/pci/devices/{domain[-4:]}:{rest}"
        names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        with driver.current():
            link = _copying(driver, lambda: [_read_value(f"{folder}/{name}") for name in names])
        return Gpu(identity, driver.batch_form, *link)
    finally:
        driver.close()


def _copying(driver: Driver, look: Callable[[], list[str | None]]) -> list[str | None]:
    """Read the link while copies run, because an idle card lowers it."""
    stream = driver.create_stream(Priority.LOW)
    host = driver.alloc_host(_WAKE_BYTES)
    device = driver.alloc_device(_WAKE_BYTES)
    try:
        driver.copy_async(device, host, _WAKE_BYTES, stream)
        driver.synchronize_stream(stream)  # long enough for the link to rise
        for _ in range(_WAKE_COPIES):
            driver.copy_async(device, host, _WAKE_BYTES, stream)
        return look()
    finally:
        driver.synchronize_stream(stream)
        driver.free_device(device)
        driver.free_host(host)
        driver.destroy_stream(stream)


def find_cards() -> tuple[str, ...]:
    """Device files of GPUs, with or without a driver."""
    try:
        names = os.listdir("/dev")
    except OSError:
        return ()
    nvidia = {name for name in names if name.startswith("nvidia") and name[6:].isdigit()}
    return tuple(sorted(f"/dev/{name}" for name in nvidia | ({"kfd"} & set(names))))


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def room_of(path: str) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _read_value(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except OSError:
        return None
    return None if not text or text.lower().startswith("unknown") or text in ("0", "255") else text


@dataclass(frozen=True)
class Environment:
    """Functions that examine the machine anew at each call.

    ``gpu`` raises OSError or DriverError without a card. ``package`` returns a package's version,
    ``plugins`` the names under an entry point, ``room`` the total and free bytes of a file system.
    ``drive`` measures the drive of a directory.
    """

    machine: Machine = field(default_factory=Machine)
    python: tuple[int, int] = sys.version_info[:2]
    gpu: Callable[[], Gpu] = lambda: look_at_gpu(0)
    cards: Callable[[], tuple[str, ...]] = find_cards
    package: Callable[[str], str | None] = package_version
    plugins: Callable[[str], tuple[str, ...]] = lambda group: tuple(
        sorted({entry.name for entry in metadata.entry_points(group=group)})
    )
    room: Callable[[str], tuple[int, int] | None] = room_of
    drive: Callable[[str], DriveFacts] = look_at_drive
    processors: Callable[[], frozenset[int]] = lambda: frozenset(os.sched_getaffinity(0))
    has_profile: Callable[[DeviceIdentity, Collection[str]], bool] = has_profile
    config: Callable[[Mapping[str, str]], Config] = lambda env: Config.load(env=env)

    @property
    def env(self) -> Mapping[str, str]:
        return self.machine.env

    def read(self, path: str) -> str | None:
        """A file's text, or None where it cannot be read."""
        return self.machine.read(path)
