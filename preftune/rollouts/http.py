"""HTTP to one server: requests with time limits that hold, from many threads, and a way to end them all at once.

Proxies of the environment are not used and no redirect is followed: what is sent goes to the server that was named.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from preftune.errors import ConfigError

_ANY_HOST = ("0.0.0.0", "::")  # where servers listen; a client has to name one


class Answer(NamedTuple):
    """A status and the bytes that came with it."""

    status: int
    body: bytes


def server_url(base_url: str | None, host: str = "localhost", port: int = 8000) -> str:
    """The address of a server without a slash at its end; the hosts that mean "any" become localhost.

    Raises:
        ConfigError: `base_url` is no http address, or carries a password.
    """
    if base_url is None:
        base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    parts = urlsplit(base_url)
    if "@" in parts.netloc:
        raise ConfigError("the server's address has a password in it; set the environment variable VLLM_API_KEY")
    try:
        name, number = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the server's address is {base_url!r}: {error}; wanted http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or name is None or parts.query or parts.fragment:
        raise ConfigError(f"the server's address is {base_url!r}; wanted one such as http://localhost:8000")
    name = "localhost" if name in _ANY_HOST else f"[{name}]" if ":" in name else name
    place = name if number is None else f"{name}:{number}"
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}"


class HttpClient:
    """Sends requests to one server; every call has a connection of its own, so that threads need no turns.

    Args:
        url: As `server_url` gives it.
        api_key: Sent as bearer token with every request; None: none is.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self._prefix = parts.path
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname or "localhost", parts.port
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def request(self, method: str, path: str, content: Any = None, *, timeout: float) -> Answer:
        """The server's answer, whatever its status.

        Args:
            content: Sent as JSON; None: nothing is.
            timeout: Seconds for all of it, also where the server sends a little now and then.

        Raises:
            TimeoutError: there was no whole answer in time.
            OSError, http.client.HTTPException: no connection, or one that broke.
        """
        deadline = time.monotonic() + timeout
        connection = self._kind(self._host, self._port, timeout=timeout)
        is_late = threading.Event()
        try:
            connection.connect()
            line: socket.socket = connection.sock  # the connection forgets it while the answer is read
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (line, is_late))
            timer.daemon = True
            with self._lock:
                self._open.add(line)
            timer.start()
            try:
                body = None if content is None else json.dumps(content).encode()
                connection.request(method, self._prefix + path, body=body, headers=self._headers)
                response = connection.getresponse()
                answer = Answer(response.status, response.read())
            finally:
                timer.cancel()
                with self._lock:
                    self._open.discard(line)
        except (OSError, http.client.HTTPException) as error:
            if is_late.is_set() or isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {timeout:.0f} s") from error
            raise
        finally:
            connection.close()
        if is_late.is_set():
            raise TimeoutError(f"no answer within {timeout:.0f} s")
        return answer

    def hang_up(self) -> None:
        """Ends all requests that are under way; each raises an OSError or HTTPException in its thread."""
        with self._lock:
            lines = list(self._open)
        for line in lines:
            _cut(line)


def _cut(line: socket.socket, mark: threading.Event | None = None) -> None:
    if mark is not None:
        mark.set()
    with suppress(OSError):  # it has ended already
        line.shutdown(socket.SHUT_RDWR)
