"""HTTPS: the context of the listening socket, whose certificate is replaced when its files change.

Each handshake uses the newest certificate; open connections keep theirs.
"""

import os
import ssl
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from oarlock.base.errors import StartupError
from oarlock.server.observability.logs import event, logger

_log = logger("tls")
_State = tuple[tuple[int, int, int], ...]  # inode, length and time of change, for both files


class ServerTls:
    """The certificate of one server, from two files that may be renewed at any time."""

    def __init__(self, certificate: str, key: str) -> None:
        """`certificate` and `key`: paths of PEM files. Raises `StartupError` if they cannot be used."""
        self._certificate, self._key = certificate, key
        self._taken = self._seen = self._state()
        self._newest, self.names, self.expires = self._load()
        # Only the callback of this context is used. It is called in every handshake, with or without a server name.
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def renew(self) -> None:
        """Load files that have changed, as soon as two calls in a row see the same state: a renewal writes two files.

        If the new files cannot be used, this is logged, and the old certificate stays.
        """
        state, before = self._state(), self._seen
        self._seen = state
        if state == self._taken or state != before:
            return
        self._taken = state
        try:
            self._newest, self.names, self.expires = self._load()
        except StartupError as error:
            _log.error(event("certificate_not_renewed", cause=error.cause, fix=error.fix))

    def _state(self) -> _State:
        return tuple(_file_state(path) for path in (self._certificate, self._key))

    def _load(self) -> tuple[ssl.SSLContext, tuple[str, ...], float]:
        """Return a context made from the current files, the certificate's names, and its expiry as Unix time."""
        chain = _parsed_chain(self._certificate)
        _check_key(self._key, chain[0], self._certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise StartupError(
                f"OpenSSL refuses {self._certificate} with {self._key}: {reason}.",
                "Give --ssl-certfile and --ssl-keyfile a pair that `openssl s_server` accepts.",
            ) from None
        names, until = _names(chain[0]), chain[0].not_valid_after_utc
        line = event(
            "certificate_loaded", file=self._certificate, names=",".join(names), until=f"{until:%Y-%m-%dT%H:%M:%SZ}"
        )
        if until < datetime.now(UTC):
            _log.warning(f"{line} warning={'it has expired: clients will refuse it'!r}")
        else:
            _log.info(line)
        return context, names, until.timestamp()


def _file_state(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:  # reading the file will report the reason
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise StartupError(
            f"{flag} {path} cannot be read: {error.strerror}.", f"Give {flag} a readable file."
        ) from None


def _parsed_chain(path: str) -> list[x509.Certificate]:
    """Return the certificate, followed by its issuers' certificates. Raises `StartupError`."""
    data = _read("--ssl-certfile", path)
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise StartupError(
            f"--ssl-certfile {path} contains no certificate in PEM.",
            "Give the file that begins with -----BEGIN CERTIFICATE-----, followed by the certificates of the issuers.",
        ) from None


def _check_key(path: str, certificate: x509.Certificate, of: str) -> None:
    """Raise `StartupError` if the file does not hold this certificate's key."""
    data = _read("--ssl-keyfile", path)
    try:
        key = load_pem_private_key(data, None)
    except TypeError:
        raise StartupError(
            f"--ssl-keyfile {path} is protected by a passphrase.",
            f"Remove the passphrase: openssl pkey -in {path} -out unlocked.pem; and give --ssl-keyfile that "
            "file, mode 0600.",
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise StartupError(
            f"--ssl-keyfile {path} contains no private key in PEM.",
            "Give the file that begins with -----BEGIN PRIVATE KEY-----.",
        ) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise StartupError(
            f"The private key in {path} does not belong to the certificate in {of}.",
            "Give --ssl-certfile and --ssl-keyfile two files of the same renewal; the server's certificate "
            "must come first.",
        )


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names for which a certificate is valid."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(extension.value.get_values_for_type(x509.DNSName))


def _no_passphrase() -> str:
    raise ValueError("the key is locked by a passphrase")
