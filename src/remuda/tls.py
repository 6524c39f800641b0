"""TLS contexts with the CA certificates of HTTPS clients, each loaded once per process."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path


@cache
def client_context(ca_bundle: str = "") -> ssl.SSLContext:
    """The context that verifies servers with the certificates of this file or folder, by default with certifi's.

    Loading certifi's takes about 30 ms, so all clients share one context.
    """
    if not ca_bundle:
        import certifi  # noqa: PLC0415 - servers without TLS need no certificates

        ca_bundle = certifi.where()
    if Path(ca_bundle).is_dir():
        return ssl.create_default_context(capath=ca_bundle)
    return ssl.create_default_context(cafile=ca_bundle)
