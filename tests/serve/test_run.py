"""A server as a process: SIGTERM lets it finish what is under way, for a while."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest

import tiny

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
