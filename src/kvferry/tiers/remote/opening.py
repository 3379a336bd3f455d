"""Opens a shared store as a tier: what must be there is looked for before a process is started."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import asdict

from kvferry.errors import ConfigError
from kvferry.settings.remote import MOONCAKE, S3, RemoteSettings, read_remote
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.remote.objects import most_in_one
from kvferry.tiers.remote.tier import OPEN_SECONDS, RemoteTier

log = logging.getLogger(__name__)

_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    S3: (("obstore", "xxhash"), "s3"),
    MOONCAKE: (("mooncake", "xxhash"), "mooncake"),
}
_HINTS = {
    MOONCAKE: " (Mooncake needs Debian's libibverbs1, libnuma1 and liburing2, or what they are "
    "called where you are)"
}


def open_remote(setup: TierSetup) -> RemoteTier:
    """The tier ``remote``. A store that cannot be reached now is no reason not to start."""
    settings = setup.remote or RemoteSettings(read_remote("remote", setup.options))
    address = settings.address
    if not setup.shared_namespace:
        raise ConfigError(
            "blocks in a shared store outlive this process and are read by others, so say what "
            "they are: open the rank with contents=Contents(namespace)"
        )
    key = settings.read_key()
    modules, extras = _NEEDS[address.kind]
    if key is not None:
        modules, extras = (*modules, "cryptography"), f"{extras},remote-encryption"
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{address} needs {' and '.join(lacking)}: pip install 'kvferry[{extras}]'"
        )
    spare_bytes = settings.spare_bytes(setup.block_bytes)
    hello: dict[str, object] = {
        "address": str(address),
        "bandwidth": settings.bandwidth,
        "namespace": setup.shared_namespace.hex(),
        "block_bytes": setup.block_bytes,
        "rank": int(setup.rank),
        "num_ranks": setup.num_ranks,
        "key": key.hex() if key is not None else None,
    }
    file = setup.host_file
    if file is not None and file.pitch >= setup.block_bytes + spare_bytes > setup.block_bytes:
        hello["host_file"] = asdict(file)
    # The tier refuses blocks without bytes, and says so.
    in_one = most_in_one(max(1, setup.block_bytes)) if address.kind == S3 else 1
    tier = RemoteTier(setup.name, setup.block_bytes, hello, most_in_one=in_one)
    tier.start(OPEN_SECONDS)
    if tier.refusal:
        tier.close()
        raise ConfigError(f"{tier.refusal}{_HINTS.get(address.kind, '')}")
    if tier.ailment:
        log.warning(
            "tier %s, %s: %s; it is used as soon as it can be", setup.name, address, tier.ailment
        )
    return tier
