"""The HTTP server: as a process that SIGTERM ends, while the model loads, and its connections as sockets."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from select import select
from time import sleep

import httpx
import pytest

import tiny
from slipstream.serve import run
from slipstream.serve.run import Loading, http_server

SLOW = """if True:
    import sys, time, slipstream.cli as cli
    from slipstream.engine.engine import Engine
    step = Engine.step
    def slowly(*args, **how):
        time.sleep(0.02)
        return step(*args, **how)
    Engine.step = slowly
    cli.main()"""


@pytest.mark.parametrize(("grace", "whole"), [("20", True), ("0", False)])
def test_sigterm_finishes_what_is_under_way(tmp_path, grace, whole):
    """A stream that takes two seconds is whole, or is cut off after the time that was given."""
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    words = ["serve", "--target", str(tmp_path), "--dtype", "float64", "--drafter", "ngram", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SLOW, *words, "--grace", grace], **pipes)
    try:
        shown = iter(process.stderr.readline, "")
        url = next(found[0] for line in shown if (found := re.search(r"http://127.0.0.1:\d+", line)))
        asked = {"model": str(tmp_path), "prompt": "abc", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 421
            process.send_signal(signal.SIGTERM)
            try:
                rest = [line for line in lines if line]
            except httpx.RemoteProtocolError:
                rest = [""]
        assert (rest[-1] == "data: [DONE]") == whole
        log, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert err.strip().endswith("the server has ended")
    assert "Traceback" not in err
    assert json.loads(log.splitlines()[-1])["path"] == "/v1/completions"


def test_a_client_hears_what_the_server_is_busy_with_and_then_the_server(serve):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
    with Loading(listener, "loading tiny") as loading:
        answers = [httpx.get(f"{url}/ready"), httpx.post(f"{url}/v1/completions", json=asked)]
        large = httpx.post(f"{url}/v1/completions", content=b"x" * 2**19)
        loading.doing = "measuring"
        answers.append(httpx.get(f"{url}/health"))
        assert [each.status_code for each in [*answers, large]] == [503] * 4
        assert all(int(each.headers["retry-after"]) > 0 for each in answers)
        says = [each.json()["error"]["message"] for each in answers]
        assert ["loading tiny" in each for each in says] == [True, True, False]
        assert "measuring" in says[2]
    http = http_server(serve().app, 5)
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    try:
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=30).status_code == 200
    finally:
        http.should_exit = True
        thread.join(30)


def test_a_client_that_says_nothing_holds_nobody():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Loading(listener, "loading"), socket.create_connection(listener.getsockname()) as silent:
        silent.send(b"GET / HTTP/1.1\r\n")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert httpx.get(url, timeout=3).status_code == 503


@pytest.mark.parametrize("method", ["PUT", "HEAD", "OPTIONS"])
def test_other_methods_get_no_page_either(method):
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Loading(listener, "loading"):
        assert httpx.request(method, f"http://127.0.0.1:{listener.getsockname()[1]}").status_code >= 500


GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture
def connect(serve, listening, monkeypatch):
    """Makes connections to a server in which a head may take half a second."""
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.5)
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
