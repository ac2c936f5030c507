"""serve: its options reach the server."""

import socket
from functools import partial
from typing import Any

import httpx
import pytest

from slipstream.cli import common, serving
from slipstream.core.grammar import GrammarLimits
from slipstream.drafters.suffix import NGram
from slipstream.serve.app import Limits, Server


@pytest.fixture
def served(run, model, monkeypatch):
    """Runs the command with these words; what the server is given, and the address it listens at."""
    given: list[Any] = []

    def take(server: Server, grace: int, listener: socket.socket, say: Any) -> None:
        given[:] = server, grace, listener.getsockname()[0]

    monkeypatch.setattr("slipstream.serve.run.run", take)

    def call(*words: str) -> list[Any]:
        code, _, err = run("serve", "--target", model, "--drafter", "ngram", "--port", "0", *words)
        assert code == 0, err
        return given

    return call


def test_every_option_reaches_the_server(served):
    """A key that was dropped would let anybody in, and every other test would pass."""
    limits = "--rows 3 --queue 5 --max-context 100 --keep 50 --max-body 1000 --max-seconds 9"
    limits += " --max-grammar-seconds 3 --max-grammar-memory 64"
    given = served(
        "--served-model-name",
        "mine",
        "--api-key",
        "secret",
        "--api-key",
        "other",
        "--grace",
        "7",
        "--allowed-host",
        "Example.com",
        *limits.split(),
    )
    server, grace, address = given
    assert isinstance(server.worker.engine.drafter, NGram)
    assert (server.spec, grace, address) == ("ngram", 7, "127.0.0.1")
    assert (server.app.keys, server.app.hosts) == (["secret", "other"], ["example.com"])
    assert server.name == "mine"
    grammar = GrammarLimits(3.0, 64)
    sizes = {"rows": 3, "queue": 5, "context": 100, "keep": 50, "body": 1000}
    assert server.limits == Limits(**sizes, seconds=9.0, grammar=grammar)


def test_a_key_may_come_from_the_environment(served, monkeypatch):
    """Without one, names are looked at."""
    app = served()[0].app
    assert (app.keys, app.hosts) == ([], [])
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret more")
    app = served()[0].app
    assert (app.keys, app.hosts) == (["secret", "more"], None)


def test_while_it_loads_it_says_so(served, monkeypatch):
    """It listened, and a client waited for minutes in silence."""
    said, listening, load = [], serving._listening, common.load

    def listens(*args: Any) -> socket.socket:
        said.append(listening(*args))
        return said[0]

    def asked(made: Any, *args: Any) -> Any:
        port = said[0].getsockname()[1]
        said.append(httpx.get(f"http://127.0.0.1:{port}/ready", timeout=20))
        return made(*args)

    monkeypatch.setattr(serving, "_listening", listens)
    monkeypatch.setattr(common, "load", partial(asked, load))
    monkeypatch.setattr("slipstream.serve.app.Server", partial(asked, Server))
    served()
    assert [each.status_code for each in said[1:]] == [503, 503]
    messages = [each.json()["error"]["message"] for each in said[1:]]
    assert ": loading " in messages[0]
    assert ": measuring rounds" in messages[1]
