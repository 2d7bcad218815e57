"""
Certificates and kubeconfigs of one local cluster, created at each start.

One authority signs all certificates. The keys use elliptic curves, so creating all of them takes
only milliseconds.
"""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=3650)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Authority:
    """The cluster's certificate authority. Its folder contains every key and certificate."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ):
        self.folder, self._certificate, self._key = folder, certificate, key

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        folder.mkdir(mode=0o700, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("drakit-rig")
        builder = _builder(name, key.public_key(), issuer=name).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        certificate = builder.sign(key, hashes.SHA256())
        authority = cls(folder, certificate, key)
        authority._write("ca", certificate, key)
        authority.write_key_pair("service-accounts")
        return authority

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(folder, certificate, key)

    def issue(
        self,
        file: str,
        *,
        common_name: str,
        organization: str | None = None,
        dns: Sequence[str] = (),
        addresses: Sequence[Address] = (),
    ) -> None:
        """Write FILE.crt and FILE.key, valid for a client and for a server with these names."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(common_name, organization)
        builder = _builder(name, key.public_key(), issuer=self._certificate.subject)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        names = [*map(x509.DNSName, dns), *map(x509.IPAddress, addresses)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self._write(file, builder.sign(self._key, hashes.SHA256()), key)

    def kubeconfig(self, path: Path, *, server: str, file: str) -> None:
        """Write a self-contained kubeconfig for the client of FILE.crt."""
        cluster = {"server": server, "certificate-authority-data": self._data("ca.crt")}
        user = {
            "client-certificate-data": self._data(f"{file}.crt"),
            "client-key-data": self._data(f"{file}.key"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": file, "user": user}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": file}}],
            "current-context": "local",
        }
        _write_private(path, json.dumps(config).encode())  # JSON is valid YAML

    def write_key_pair(self, file: str) -> None:
        """Write FILE.key and FILE.pub."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        _write_private(self.folder / f"{file}.key", _pem(key))
        (self.folder / f"{file}.pub").write_bytes(public)

    def _write(self, file: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        (self.folder / f"{file}.crt").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        _write_private(self.folder / f"{file}.key", _pem(key))

    def _data(self, file: str) -> str:
        return base64.b64encode((self.folder / file).read_bytes()).decode()


def _name(common_name: str, organization: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _builder(
    name: x509.Name, key: ec.EllipticCurvePublicKey, *, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Tolerate clocks that are slightly behind, as on machines that were suspended.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
