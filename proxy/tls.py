"""TLS to clients and to engines: files are read and checked at start-up."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


class TlsError(ValueError):
    """An unusable file; names its flag and the remedy."""


@dataclass(frozen=True)
class Tls:
    """TLS to clients; the flags are ``--ssl-`` and a field's name, as in uvicorn and vLLM.

    ``cert_reqs`` is a value of ``ssl.VerifyMode``: whether clients must present a certificate of
    ``ca_certs``.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0

    def context(self) -> ssl.SSLContext:
        """Returns the context for the client port. Raises ``TlsError``."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION
        try:
            mode = ssl.VerifyMode(self.cert_reqs)
        except ValueError as error:
            raise TlsError(
                f"--ssl-cert-reqs: {self.cert_reqs} is none of 0 (none), 1 (optional), 2 (required)"
            ) from error
        if mode is not ssl.CERT_NONE and self.ca_certs is None:
            raise TlsError(
                f"--ssl-cert-reqs: {self.cert_reqs} needs --ssl-ca-certs, which says whose certificates count"
            )
        _readable("--ssl-certfile", self.certfile)
        _readable("--ssl-keyfile", self.keyfile)
        try:
            made.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except _NeedsPassword as error:
            raise TlsError(
                f"--ssl-keyfile: {self.keyfile or self.certfile} needs a password; give a key without one"
            ) from error
        except (OSError, ValueError) as error:
            raise TlsError(
                f"--ssl-certfile: {self.certfile} and the key in {self.keyfile or 'it'} can't be used:"
                f" {_reason(error)}; give a PEM chain and its own private key"
            ) from error
        if self.ca_certs is not None:
            _trust(made, self.ca_certs, "--ssl-ca-certs")
        made.verify_mode = mode
        return made


@dataclass(frozen=True)
class EngineTls:
    """TLS to engines (``--engine-scheme https``). ``certfile``: for engines that require a client
    certificate."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context for connections to engines, whose certificates must match their host names."""
        made = ssl.create_default_context()
        if self.ca_certs is not None:
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _trust(made, self.ca_certs, "--engine-ca-certs")
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certfile is None:
            if self.keyfile is not None:
                raise TlsError("--engine-keyfile: needs --engine-certfile too")
            return made
        _readable("--engine-certfile", self.certfile)
        _readable("--engine-keyfile", self.keyfile)
        try:
            made.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except _NeedsPassword as error:
            raise TlsError("--engine-keyfile: needs a password; give a key without one") from error
        except (OSError, ValueError) as error:
            raise TlsError(
                f"--engine-certfile: {self.certfile} and its key can't be used: {_reason(error)};"
                " give a PEM chain and its own private key"
            ) from error
        return made


class _NeedsPassword(Exception):
    pass


def _no_password() -> str:
    """Prevents OpenSSL from asking on the terminal."""
    raise _NeedsPassword


def _readable(flag: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        raise TlsError(f"{flag}: {path!r} can't be read: {_reason(error)}") from error


def _trust(context: ssl.SSLContext, path: str, flag: str) -> None:
    _readable(flag, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise TlsError(f"{flag}: {path} has no certificates: {_reason(error)}; give a PEM file") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
