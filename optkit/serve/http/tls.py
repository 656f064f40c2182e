"""The files of HTTPS: a certificate chain and its private key, checked before the model is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from optkit.errors import UserError

CERTIFICATE, KEY = "--ssl-certfile", "--ssl-keyfile"


def check_tls(certificate: Path | None, key: Path | None) -> bool:
    """True for HTTPS, False without files.

    Args:
        certificate: PEM file with the chain; may hold the key, too.
        key: PEM file with the private key, without a passphrase.

    Raises:
        UserError: a file is missing or wrong, or the two do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise UserError(f"{KEY} needs {CERTIFICATE}", where=KEY)
        return False
    for option, file in ((CERTIFICATE, certificate), (KEY, key)):
        if file is not None and not file.is_file():
            raise UserError(f"there is no file {file}", where=option)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_passphrase)
    except (ssl.SSLError, OSError) as error:
        fix = f"{CERTIFICATE} takes the certificate chain and {KEY} its private key, both as PEM, without a passphrase"
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"certificate and key cannot be used: {reason}", where=CERTIFICATE, fix=fix
        ) from error
    return True


def _no_passphrase() -> str:
    """The answer to the question for a passphrase, which else goes to the terminal."""
    return ""
