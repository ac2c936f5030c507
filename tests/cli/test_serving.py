"""serve: its options reach the server."""

from typing import Any

import pytest

from slipstream.drafters.ngram import NGram
from slipstream.serve.app import Limits


@pytest.fixture
def served(run, model, monkeypatch):
    """Runs the command with these words; what the server is given, and the address it listens at."""
    given: list[Any] = []

    def take(*args: Any) -> None:
        given.extend([*args[:-2], args[-2].getsockname()[0]])

    monkeypatch.setattr("slipstream.serve.run.run", take)

    def call(*words: str) -> list[Any]:
        code, _, err = run("serve", "--target", model, "--drafter", "ngram", "--port", "0", *words)
        assert code == 0, err
        return given

    return call


def test_every_option_reaches_the_server(served):
    """A key that was dropped would let anybody in, and every other test would pass."""
    limits = "--rows 3 --queue 5 --max-context 100 --keep 50 --max-body 1000 --max-seconds 9"
    given = served("--api-key", "secret", "--grace", "7", "--allowed-host", "Example.com", *limits.split())
    _, drafter, spec, limits, key, grace, hosts, address = given
    assert isinstance(drafter, NGram)
    assert (spec, key, grace, hosts, address) == ("ngram", "secret", 7, ["example.com"], "127.0.0.1")
    assert limits == Limits(rows=3, queue=5, context=100, keep=50, body=1000, seconds=9.0)


def test_a_key_may_come_from_the_environment(served, monkeypatch):
    assert served()[4] is None
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    assert served()[-4] == "secret"
