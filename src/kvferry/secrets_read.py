"""A secret as a setting gives it: itself, or the file it is in."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.quantities import quoted

LEAST_CHARS = 16
_MOST_CHARS = 4096
_FILE = "file:"


def read_secret(name: str, value: object) -> str:
    """A secret of printable ASCII without spaces, so that a header can carry it.

    It is never shown, not even where it is refused.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name}: expected text, or file:PATH of a file with it")
    secret, where = value.strip(), ""
    if secret.startswith(_FILE):
        where = f" in {quoted(secret.removeprefix(_FILE))}"
        secret = _from_file(name, secret.removeprefix(_FILE))
    if not LEAST_CHARS <= len(secret) <= _MOST_CHARS:
        raise ConfigError(
            f"{name}: a secret{where} has at least {LEAST_CHARS} characters, this one {len(secret)}"
        )
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError(f"{name}: a secret{where} is printable ASCII without spaces")
    return secret


def _from_file(name: str, path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="ascii") as file:
            return file.read(_MOST_CHARS + 2).strip()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise ConfigError(f"{name}: cannot read {quoted(path)}: {words}") from None
