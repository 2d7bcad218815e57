"""
Describes failed connections to the API server, without names of Python classes.

Does not depend on sessions or requests.
"""

from __future__ import annotations

import os

import aiohttp

CHECK = "; check this address, and that the API server is running"
"""The remedy for a failed connection."""


def connection_problem(error: aiohttp.ClientError | OSError) -> str:
    """Describe a failed connection, as the end of a sentence that begins with the API server."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return f"cannot be reached: its host name cannot be resolved{CHECK}"
        case aiohttp.ClientProxyConnectionError():
            return (
                f"cannot be reached: the proxy {error.host}:{error.port} does not accept "
                "connections; check HTTPS_PROXY, NO_PROXY and the kubeconfig's proxy-url"
            )
        case aiohttp.ClientConnectorCertificateError():
            cause = error.certificate_error
            why = getattr(cause, "verify_message", None) or str(cause)
            return f"has an invalid certificate: {why}; check the certificate authority"
        case aiohttp.ClientSSLError():
            why = getattr(error.os_error, "reason", None) or str(error.os_error)
            return f"does not accept a TLS connection: {why}{CHECK}"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            why = os.strerror(number) if number and number > 0 else str(error.os_error)
            return f"cannot be reached: {why}{CHECK}"
        case aiohttp.InvalidURL():
            return "does not have a valid URL; check this address"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | OSError():
            return "closed the connection before the response was complete"
        case _:
            return f"sent an invalid response: {error}"
