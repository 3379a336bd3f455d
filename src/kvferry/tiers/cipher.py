"""AES-256-GCM for blocks that leave the machine's memory: neither read nor forged without it."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from kvferry.errors import ConfigError, install

NONCE_BYTES, TAG_BYTES = 12, 16


class Cipher:
    """Seals blocks under one key, each with a nonce of its own and bound to a name.

    Nonces are random: after 2**32 blocks under one key, the chance that two were alike is 2**-33.
    """

    def __init__(self, key: bytes, setting: str, extra: str) -> None:
        """ConfigError, by the ``setting`` that asked for it, where ``extra`` is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(f"{setting}: {error}; {install(extra)}") from error
        if not hasattr(AESGCM, "encrypt_into"):
            raise ConfigError(f"{setting}: cryptography 47 or later is needed")
        self._wrong: type[Exception] = InvalidTag
        self._gcm: Any = AESGCM(key)

    def seal(self, plain: memoryview, name: bytes, out: memoryview) -> bytes:
        """Write the sealed block and its tag to ``out``; the nonce, which opens it again."""
        nonce = os.urandom(NONCE_BYTES)
        self._gcm.encrypt_into(nonce, plain, name, out)
        return nonce

    def unseal(self, nonce: bytes, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Write the block of ``sealed`` and its tag to ``out``; False: it is not what was sealed
        under this name and key, and nothing of ``out`` may be used.
        """
        try:
            self._gcm.decrypt_into(nonce, sealed, name, out)
        except self._wrong:
            return False
        return True


def derived_key(key: bytes, purpose: bytes, person: bytes) -> bytes:
    """A key of its own for one purpose: what is sealed for it never meets another's nonces."""
    return hashlib.blake2b(purpose, key=key, digest_size=32, person=person).digest()
