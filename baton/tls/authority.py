"""A development CA and its leaf certificates in one folder: made, renewed, listed.

For production bring your own (cert-manager, a company's CA): the same names in the certificates, the same three
files for each process. Knows nothing of who uses them. Keys are P-256, files have mode 0600, and each is replaced
as a whole.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.protos.errors import ConfigError

ROLES = ("router", "worker", "client", "monitor", "redis", "ray")
SERVING = ("router", "redis", "ray")  # reached by host name or address, not by role alone
HERE = ("localhost", "127.0.0.1", "::1")
CA_DAYS, LEAF_DAYS = 3650, 90  # days that the CA's and the ends' certificates are valid
BACKDATE = datetime.timedelta(minutes=5)  # clocks of machines differ
RENEW_SHARE = 1 / 3  # of its life left: then ``make`` makes a new one
CA = "ca"


class CertificateStatus(msgspec.Struct, frozen=True):
    """Describes one certificate of the folder."""

    role: str  # its file's name, "ca" for the CA
    names: tuple[str, ...]  # DNS names and addresses
    ends: float  # Unix seconds
    signed_here: bool  # by the folder's present CA


class Authority:
    """Holds the CA of ``folder``, creating it for ``ca_days`` if there is none.

    ``domain`` ends the names of roles. Raises ConfigError if the folder or its CA can't be used.
    """

    def __init__(self, folder: Path, domain: str = "baton.internal", ca_days: int = CA_DAYS) -> None:
        self.folder, self.domain = folder, domain
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._path(CA, "crt").exists():
                self._make_ca(ca_days)
            self._cert, self._key = self._load(CA)
        except OSError as error:
            raise ConfigError(f"certificates can't be kept in {folder}: {error.strerror}", "tls.dir") from None

    def make(
        self, roles: Iterable[str] = ROLES, hosts: Sequence[str] = (), days: float = LEAF_DAYS, anew: bool = False
    ) -> list[str]:
        """Writes a certificate for each role that has none or whose own is near its end; for all if ``anew``.

        Returns the roles written. ``hosts`` are further names or addresses, besides those of an old certificate.
        """
        return [role for role in roles if self._write_leaf(role, hosts, days, anew)]

    def show(self) -> list[CertificateStatus]:
        """Returns the status of every certificate in the folder, the CA first."""
        found = [CA, *sorted(path.stem for path in self.folder.glob("*.crt") if path.stem != CA)]
        return [self._shown(role) for role in found]

    def _shown(self, role: str) -> CertificateStatus:
        cert = self._load_cert(role)
        return CertificateStatus(
            role, tuple(_names(cert)), cert.not_valid_after_utc.timestamp(), _is_signed_by(cert, self._cert)
        )

    def _write_leaf(self, role: str, hosts: Sequence[str], days: float, anew: bool) -> bool:
        kept: Sequence[str] = ()
        if self._path(role, "crt").exists():
            old = self._load_cert(role)
            if not anew and not _near_end(old) and _is_signed_by(old, self._cert):
                return False
            kept = _names(old)
        self.issue(role, self._subject_names(role, [*hosts, *kept]), days)
        return True

    def issue(self, role: str, names: Sequence[str], days: float = LEAF_DAYS) -> None:
        """Writes ``role``.crt and ``role``.key for ``names`` (DNS names or addresses), valid for ``days``."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _begun(role, key, days, self._cert.subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        self._save(role, builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256()), key)

    def _subject_names(self, role: str, hosts: Iterable[str]) -> list[str]:
        names = [f"{role}.{self.domain}", *(HERE if role in SERVING else ()), *hosts]
        if role in SERVING:
            names.append(socket.gethostname())
        return list(dict.fromkeys(name for name in names if name))

    def _make_ca(self, days: int) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"Baton development CA {os.urandom(4).hex()}"
        builder = _begun(name, key, days, None)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        self._save(CA, builder.sign(key, hashes.SHA256()), key)

    def _save(self, role: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _replace(self._path(role, "key"), text)
        _replace(self._path(role, "crt"), cert.public_bytes(serialization.Encoding.PEM))

    def _load(self, role: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        path = self._path(role, "key")
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} holds no key that can be read: {error}", "tls.dir") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{path} is not a key that `baton certs` made", "tls.dir")
        return self._load_cert(role), key

    def _load_cert(self, role: str) -> x509.Certificate:
        path = self._path(role, "crt")
        try:
            return x509.load_pem_x509_certificate(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} holds no certificate: {error}", "tls.dir") from None

    def _path(self, role: str, kind: str) -> Path:
        return self.folder / f"{role}.{kind}"


def _begun(
    name: str, key: ec.EllipticCurvePrivateKey, days: float, issuer: x509.Name | None
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - BACKDATE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names(cert: x509.Certificate) -> list[str]:
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found]


def _near_end(cert: x509.Certificate) -> bool:
    life = cert.not_valid_after_utc - cert.not_valid_before_utc
    return cert.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < life * RENEW_SHARE


def _is_signed_by(cert: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _replace(path: Path, data: bytes) -> None:
    """Writes all of a file or nothing, readable for the owner alone."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    draft.replace(path)
