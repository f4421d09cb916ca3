"""Certificates as tests need them: authorities, and what they sign, written as PEM files."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stagemesh.shared.security.material import TlsFiles

VALID = timedelta(days=30)
EXPIRED = timedelta(days=-1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def cert_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, form, plain)


class Authority:
    """Signs for loopback."""

    def __init__(self, name: str, valid: timedelta = VALID) -> None:
        name = f"{name} authority"
        key = ec.generate_private_key(ec.SECP256R1())
        self._own = Issued(_build(name, key, name, key, valid, authority=True), key)
        self._name = name

    @property
    def pem(self) -> bytes:
        return self._own.cert_pem

    def issue(self, name: str, valid: timedelta = VALID, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        return Issued(_build(name, key, self._name, self._own.key, valid, hosts=hosts), key)


def _build(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    valid: timedelta,
    *,
    hosts: tuple[str, ...] = (),
    authority: bool = False,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=3))
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_files(folder: Path, issued: Issued, ca_pem: bytes, name: str = "mesh") -> TlsFiles:
    """Each file is replaced as a whole, the key private."""
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}-ca.pem")
    for path, data in ((files.cert, issued.cert_pem), (files.key, issued.key_pem), (files.ca, ca_pem)):
        assert path is not None
        draft = path.with_suffix(".new")
        draft.write_bytes(data)
        draft.chmod(0o600)
        draft.replace(path)
    return files
