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
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def listen(host: str, port: int) -> Listening:
    """Bind. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port"
        ) from None
    return Listening(sock, host, sock.getsockname()[1])


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
