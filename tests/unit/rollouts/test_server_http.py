"""The HTTP below ServerBackend: addresses, time limits that hold against any server, and hanging up.

Some servers here are bare sockets, since no well-behaved one sends a byte now and then for ever.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from preftune.errors import ConfigError
from preftune.rollouts.http import HttpClient, server_url
from tests.support.vllm_server import FakeVllm


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((None, "0.0.0.0", 8000), "http://localhost:8000"),
        ((None, "::", 8000), "http://localhost:8000"),
        ((None, "node-3", 80), "http://node-3:80"),
        ((None, "::1", 80), "http://[::1]:80"),
        (("http://0.0.0.0:9/",), "http://localhost:9"),
        (("https://vllm.example/deep/path/", "ignored", 1), "https://vllm.example/deep/path"),
        (("HTTP://Node:8000",), "http://node:8000"),
    ],
)
def test_addresses(given, wanted):
    assert server_url(*given) == wanted


@pytest.mark.parametrize(
    "given", ["localhost:8000", "localhost", "ftp://a", "http://", "http://a:99999", "http://a?b=1", "http://a#b"]
)
def test_addresses_that_are_none(given):
    with pytest.raises(ConfigError, match="the server's address is"):
        server_url(given)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as caught:
        server_url("http://me:secret@host:1?x")
    assert "secret" not in str(caught.value)


@contextmanager
def trickling(first: bytes):
    """A server that answers with `first` and then a byte every 30 ms."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            line, _ = listening.accept()
            with line:
                line.recv(1000)
                try:
                    line.sendall(first)
                    while not ended.is_set():
                        line.sendall(b"a")
                        time.sleep(0.03)
                except OSError:
                    ended.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        thread.join(5)


@pytest.mark.parametrize(
    "first",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n",
     b"HTTP/1.0 200 OK\r\n\r\n"],
    ids=["status", "headers", "header", "body", "body without length"],
)  # fmt: skip
def test_a_trickle_does_not_stretch_the_time(first):
    with trickling(first) as url:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer within"):
            HttpClient(url).request("GET", "/", timeout=0.3)
        assert 0.25 < time.monotonic() - started < 3


def test_silence_ends_in_time():
    with FakeVllm() as server:
        release = threading.Event()
        server.routes["GET /health"] = lambda _: (release.wait(20), b"")
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer within"):
            HttpClient(server.url).request("GET", "/health", timeout=0.3)
        assert time.monotonic() - started < 3
        release.set()


def test_hanging_up_ends_what_is_under_way():
    with FakeVllm() as server, ThreadPoolExecutor(2) as pool:
        release = threading.Event()
        server.routes["GET /health"] = lambda _: (release.wait(20), b"")
        client = HttpClient(server.url)
        calls = [pool.submit(client.request, "GET", "/health", timeout=20) for _ in range(2)]
        while len(server.asked) < 2:
            time.sleep(0.01)
        client.hang_up()
        for call in calls:
            with pytest.raises((OSError, http.client.HTTPException)):
                call.result(5)
        release.set()
        server.routes["GET /health"] = lambda _: (200, b"well")
        assert client.request("GET", "/health", timeout=5) == (200, b"well")


def test_proxies_are_not_used_and_redirects_not_followed(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with FakeVllm() as server:
        assert HttpClient(server.url).request("GET", "/health", timeout=5).status == 200
        server.routes["GET /health"] = lambda _: (302, b"")
        assert HttpClient(server.url).request("GET", "/health", timeout=5).status == 302
        assert len(server.asked) == 2


def test_a_prefix_of_the_path_is_kept():
    with FakeVllm() as server:
        HttpClient(f"{server.url}/deep").request("GET", "/health", timeout=5)
        assert server.asked[0][1] == "/deep/health"
