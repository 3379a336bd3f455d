"""What the kernel knows about the link a card sits on."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys/bus/pci/devices")
UNKNOWN_LINK = "unknown"


def pcie_link(bus_id: str, sysfs: Path = SYSFS) -> str:
    """The widest link the card can have here, as in ``"32.0 GT/s PCIe x16"``.

    The maximum, not the current state: an idle card lowers its link, and a profile must not
    depend on whether the card happened to be idle. Guests often hide it: then ``"unknown"``.
    """
    device = sysfs / _canonical(bus_id)
    try:
        speed = (device / "max_link_speed").read_text().strip()
        width = (device / "max_link_width").read_text().strip()
    except OSError:
        return UNKNOWN_LINK
    # 255 lanes is how the kernel spells "the card would not say".
    if not speed or speed.lower().startswith("unknown") or width in ("", "0", "255"):
        return UNKNOWN_LINK
    return f"{speed} x{width}"


def _canonical(bus_id: str) -> str:
    """The driver may write the domain with eight digits, the kernel uses four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
