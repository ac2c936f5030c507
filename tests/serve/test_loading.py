"""While the model loads a client hears so, and then the server answers at the same socket."""

import socket
import threading

import httpx
import pytest

from slipstream.serve.loading import Loading
from slipstream.serve.run import made


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
    http = made(serve(), 5)
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
