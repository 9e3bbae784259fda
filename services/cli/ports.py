"""Ports and sockets."""

import errno
import socket

from services.common.errors import ConfigurationError

BACKLOG = 2048


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, to hand down to routers: connections wait in it while none of them is there.

    Raises ConfigurationError.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is taken; choose another with --port" if taken else error.strerror
        raise ConfigurationError(f"cannot listen on {host} port {port}: {why}") from None
    return listener


def http_url(host: str, port: int) -> str:
    """The URL under which a server that listens on `host` is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
