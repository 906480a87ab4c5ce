"""Certificates as a public authority would give them, of an authority that only a test trusts."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM, _PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


@dataclass(frozen=True)
class Pair:
    """The files of one server's certificate."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; clients trust `file`."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        self._serial = 1
        own = self._builder(self._name, self._key, 30).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.file = folder / "authority.pem"
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        self._serial += 1
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(self._serial)
            .not_valid_before(now - datetime.timedelta(days=60))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    def write(self, pair: Pair, *names: str, days: float = 30, passphrase: bytes | None = None) -> int:
        """A new certificate with a new key, for these names. Returns its serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        builder = self._builder(subject, key, days).add_extension(alternatives, critical=False)
        locked = (
            serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
        )
        pair.key.write_bytes(key.private_bytes(_PEM, _PKCS8, locked))
        pair.certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        return self._serial
