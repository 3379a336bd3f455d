"""Whose blocks a store holds, and what its folder is called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import InputError
from kvferry.tiers.disk.pages import MOST_PROOF_BYTES

NAMESPACE_BYTES = 32
MOST_LABEL_BYTES = 256
FOLDER = re.compile(r"kvferry-[0-9a-f]{16}-r[0-9]+of[0-9]+-d[0-9]+of[0-9]+")
"""What the folder of a store is called."""


@dataclass(frozen=True)
class StoreIdentity:
    """What must agree for a store to be read: whose blocks, how large, which part of them.

    ``namespace`` decides the bytes of this rank's blocks; ``family`` is the same for all ranks of
    one server. ``label`` is for people, and need not agree.
    """

    namespace: bytes
    block_bytes: int
    pitch: int
    proof_bytes: int
    is_sealed: bool = False
    rank: int = 0
    num_ranks: int = 1
    stripe: int = 0
    num_stripes: int = 1
    family: bytes = b""
    label: str = ""

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES or len(self.family) > NAMESPACE_BYTES:
            raise InputError(
                f"a store's namespace has {NAMESPACE_BYTES} bytes and its family at most as many, "
                f"got {len(self.namespace)} and {len(self.family)}"
            )
        if not 0 < self.block_bytes <= self.pitch or self.pitch % 4096:
            raise InputError(
                f"blocks of {self.block_bytes} bytes cannot lie {self.pitch} bytes apart: a place "
                "is a multiple of 4096 bytes and holds a block"
            )
        if not 0 < self.proof_bytes <= MOST_PROOF_BYTES:
            raise InputError(f"a proof of {self.proof_bytes} bytes: 1 to {MOST_PROOF_BYTES} fit")
        for what, number, of in (
            ("rank", self.rank, self.num_ranks),
            ("directory", self.stripe, self.num_stripes),
        ):
            if not 0 <= number < of < 1 << 31:
                raise InputError(f"there is no {what} {number} of {of}")

    @property
    def folder_name(self) -> str:
        return (
            f"kvferry-{self.namespace.hex()[:16]}-r{self.rank}of{self.num_ranks}"
            f"-d{self.stripe}of{self.num_stripes}"
        )

    @property
    def short_label(self) -> str:
        """The label, no longer than a superblock has room for."""
        return self.label.encode()[:MOST_LABEL_BYTES].decode(errors="ignore")
