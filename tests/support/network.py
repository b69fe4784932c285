"""Denies connections that leave this machine, and remembers each attempt.

The error is no `OSError` on purpose: libraries swallow those, fall back without a word, and the test passes by luck.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

attempts: list[str] = []


class NetworkDeniedError(RuntimeError):
    """A test tried to reach another machine."""


def is_local(address: Any) -> bool:
    """True for loopback addresses, names of this machine, and what is no (host, port) pair, such as a Unix socket."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _check(address: Any) -> None:
    if not is_local(address):
        attempts.append(str(address))
        raise NetworkDeniedError(f"a test tried to connect to {address!r}; tests use this machine only")


def _guarded_method(original: Callable) -> Callable:
    def method(self, address, *args):
        _check(address)
        return original(self, address, *args)

    return method


def install() -> None:
    """Guards `connect`, `connect_ex` and name look-ups of this process for good."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        _check((host, port))
        return look_up(host, port, *args, **kwargs)

    for name, original in (("connect", socket.socket.connect), ("connect_ex", socket.socket.connect_ex)):
        setattr(socket.socket, name, _guarded_method(original))
    socket.getaddrinfo = getaddrinfo
