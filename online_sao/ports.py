"""Ports: bound before anything is started, or found free."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from online_sao.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Listening:
    """A bound socket, so that a taken port is known before anything is started."""

    sock: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where clients find the service."""
        return url_of(self.host, self.port)


def url_of(host: str, port: int) -> str:
    """Where clients on this machine find what listens on `host`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> Listening:
    """Bind. Raises ConfigError when the address cannot be had."""
    try:
        sock = _bound(host, port)
    except (OSError, TypeError) as error:  # TypeError: no name of a host at all
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --host or --port"
        ) from None
    return Listening(sock, host, sock.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
