"""Ports: had before anything starts, or refused in one clear line."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from online_sao.errors import ConfigError
from online_sao.ports import Listening, free_port, listen, url_of


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_port_0_is_answered_with_the_real_port_and_clients_get_through() -> None:
    listening = listen("127.0.0.1", 0)
    with listening.sock:
        assert listening.port > 0
        assert listening.url == f"http://127.0.0.1:{listening.port}"
        with socket.create_connection(("127.0.0.1", listening.port), timeout=5):
            connection, _ = listening.sock.accept()
            connection.close()


def test_taken_port_is_refused_by_name_and_its_owner_keeps_it(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{taken}.*in use.*--port"):
        listen("127.0.0.1", taken)
    with socket.create_connection(("127.0.0.1", taken), timeout=5):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70, "ä..b"])
def test_address_that_is_not_this_machines_is_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0"):
        listen(host, 0)


def test_machine_without_ipv6_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", unsupported)
    with pytest.raises(ConfigError, match="::1:8000: Address family not supported"):
        listen("::1", 8000)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8000"),
        ("fe80::2", "http://[fe80::2]:8000"),
        ("192.0.2.7", "http://192.0.2.7:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
    ],
)
def test_url_puts_ipv6_in_brackets_and_every_address_into_the_loopback(host: str, url: str) -> None:
    assert url_of(host, 8000) == url
    with socket.socket() as sock:
        assert Listening(sock, host, 8000).url == url


def test_free_port_can_be_listened_on() -> None:
    port = free_port()
    listening = listen("127.0.0.1", port)
    with listening.sock:
        assert listening.port == port
