"""Certificates and keys for trying out a federation on one machine."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aipod._misc.files import private_folder, write_bytes

_DAYS = 30


def make_certificates(folder: Path) -> None:
    """Writes an authority `ca.crt`, and `server.crt` with `server.key` for this machine only."""
    private_folder(folder)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _name("aipod federation on this machine")
    signed = _signed(authority, authority, authority_key, authority_key, None)
    write_bytes(folder / "ca.crt", signed, private=True)
    names = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    server = _signed(_name("localhost"), authority, server_key, authority_key, names)
    write_bytes(folder / "server.crt", server, private=True)
    private = _private(server_key, serialization.PrivateFormat.PKCS8)
    write_bytes(folder / "server.key", private, private=True)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a node's private and public key, as `ssh-keygen -t ecdsa -b 384` does."""
    private_folder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    write_bytes(private, _private(key, serialization.PrivateFormat.OpenSSH), private=True)
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_bytes(public, line + b" " + name.encode() + b"\n", private=True)
    return private, public


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None,
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    public, issuing = key.public_key(), issuer_key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing), critical=False)
        .add_extension(_usage(names is None), critical=True)
    )
    if names is not None:
        certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return certificate.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
