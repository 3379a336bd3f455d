"""AES-256-GCM for blocks on drives and in shared stores: no reading or forging without the key."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from kvferry.errors import ConfigError, install

NONCE_BYTES, TAG_BYTES = 12, 16


class Cipher:
    """Encrypts blocks under one key, each with its own nonce, and binds each to a name.

    Nonces are random: after 2**32 blocks under one key, the chance of a repeated nonce is 2**-33.
    """

    def __init__(self, key: bytes, setting: str, extra: str) -> None:
        """Raise ConfigError, naming ``setting``, if the packages of ``extra`` are not installed."""
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
        """Write the encrypted block and its tag to ``out``; return the nonce that decrypts it."""
        nonce = os.urandom(NONCE_BYTES)
        self._gcm.encrypt_into(nonce, plain, name, out)
        return nonce

    def unseal(self, nonce: bytes, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Decrypt the block and tag in ``sealed`` to ``out``; False: they are not authentic.

        They were not sealed under this name and key then, and ``out`` must not be used.
        """
        try:
            self._gcm.decrypt_into(nonce, sealed, name, out)
        except self._wrong:
            return False
        return True


def derived_key(key: bytes, purpose: bytes, person: bytes) -> bytes:
    """Derive a key for one purpose, so that no nonce is used twice under it by another purpose."""
    return hashlib.blake2b(purpose, key=key, digest_size=32, person=person).digest()
