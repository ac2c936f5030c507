"""Connections of a running server, as sockets."""

from contextlib import ExitStack, closing
from http.client import HTTPConnection
from select import select
from time import sleep

import pytest

from slipstream.serve import connection

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture
def connect(serve, listening, monkeypatch):
    """Makes connections to a server in which a head may take half a second."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    with listening(serve()) as url, ExitStack() as clients:

        def made() -> HTTPConnection:
            client = clients.enter_context(closing(HTTPConnection(url.removeprefix("http://"), timeout=10)))
            client.connect()
            return client

        yield made


def asked(client: HTTPConnection) -> int:
    """The status of an answer, which is read."""
    client.request("GET", "/health")
    answer = client.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("half", [b"\r\n", b"GE", GET])
def test_a_head_that_does_not_come_ends_the_connection(connect, half, again):
    """Half a head held its connection until there were no file descriptors."""
    client = connect()
    if again:
        assert asked(client) == 200
    client.sock.sendall(half)
    assert client.sock.recv(1) == b""


def test_a_piece_of_a_head_now_and_then_gives_no_more_time(connect):
    client = connect()
    client.sock.sendall(GET + b"Cookie: ")
    for _ in range(100):
        if select([client.sock], [], [], 0.1)[0]:
            break
        client.sock.sendall(b"a")
    assert client.sock.recv(1) == b""


def test_a_connection_without_a_request_ends(connect):
    assert connect().sock.recv(1) == b""


def test_a_slow_body_and_a_late_second_request_are_answered(connect):
    client = connect()
    for _ in range(2):
        client.putrequest("POST", "/v1/completions")
        client.putheader("Content-Length", "2")
        client.endheaders(b"{")
        sleep(0.8)
        client.send(b"}")
        assert client.getresponse().read()
        sleep(0.8)  # longer than a head may take, and shorter than uvicorn keeps an idle connection
    assert asked(client) == 200


def test_a_head_that_is_too_long_is_refused(connect):
    """100 MB of one header were taken."""
    client = connect()
    client.sock.sendall(GET + b"Cookie: ")
    sent = 0
    while sent < 2**18 and not select([client.sock], [], [], 0.01)[0]:
        client.sock.sendall(b"a" * 2**14)
        sent += 2**14
    assert client.sock.recv(2**12).endswith(b"the head of a request may have 65536 bytes")
    client = connect()
    client.request("GET", "/health", headers={"Cookie": "a" * 2**14})
    assert client.getresponse().status == 200
