"""Certificates for a server on this machine: who signs them, whom they name, until when."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Files in PEM: a certificate, its key, and the authority that signed it."""

    chain: Path
    key: Path
    authority: Path


def make_certificate(folder: Path, address: str = "127.0.0.1", hours: int = 1) -> Certificate:
    """By an authority of its own. ``hours`` below zero: it is out of date already."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.timezone.utc)
    end = now + datetime.timedelta(hours=hours)
    begin = min(now, end) - datetime.timedelta(hours=1)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (_name(f"kvferry test {who}") for who in ("authority", "server"))

    def sign(subject: x509.Name, public: ec.EllipticCurvePublicKey, is_ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    made = Certificate(folder / "server.pem", folder / "server.key", folder / "authority.pem")
    made.authority.write_bytes(sign(ca_name, ca_key.public_key(), True))
    made.chain.write_bytes(sign(name, key.public_key(), False))
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


def _name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])
