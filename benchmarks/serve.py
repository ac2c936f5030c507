"""What does the server cost? Streaming clients beside the same session without a server, in turn, and the
time to the first token of an idle server beside the prompt's pass.

    python benchmarks/serve.py smollm2 --questions mt_bench.jsonl --json benchmarks/results/serve.json

Each turn answers the same questions three times, at T = 0, all at once: by `generate`; by the server's engine
alone, without HTTP; and by as many clients that start together and stream over HTTP from a process of their
own, on the same cores. The first two get token ids. All must say the same. Then one question at a time: the
prompt's pass in a session that is there already, and the first token that a client sees, in turn. Medians
over the turns.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from common import run
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.engine.engine import Engine
from slipstream.engine.generate import generate
from slipstream.engine.request import Request
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_writable, write_json
from slipstream.measure.datasets import load_questions
from slipstream.results import heading
from slipstream.serve.app import Limits, Server
from slipstream.serve.run import http_server
from slipstream.serve.worker import Update, Worker
from slipstream.targets import HFTarget, load_target
from slipstream.targets.prompts import encode

Ask = Any  # requests -> what `serve_clients` says of them


@contextmanager
def served(target: HFTarget, drafter: Drafter, rows: int) -> Iterator[Ask]:
    """Yields what asks a server, by clients in a process of their own."""
    server = Server(target, drafter, "auto", Limits(rows=rows, keep=0))  # all read their prompts
    listener = socket.create_server(("127.0.0.1", 0))
    http = http_server(server.app, 5)
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    words = [sys.executable, str(Path(__file__).with_name("serve_clients.py"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None
        assert clients.stdout is not None
        to, back = clients.stdin, clients.stdout

        def ask(bodies: list[dict[str, Any]]) -> dict[str, Any]:
            job = {"host": "127.0.0.1", "port": listener.getsockname()[1], "bodies": bodies}
            print(json.dumps(job), file=to, flush=True)
            answers: dict[str, Any] = json.loads(back.readline())
            return answers

        yield ask
        to.close()
    http.should_exit = True
    thread.join()


def compare(
    target: HFTarget, drafter: Drafter, asked: Sequence[str], new: int, turns: int, alone: int
) -> dict[str, Any]:
    """Both comparisons: `turns` of all texts at once, and `alone` of one text at a time."""
    messages = [[{"role": "user", "content": text}] for text in asked]
    prompts = [encode(target, each) for each in messages]
    body = {"model": target.name, "stream": True, "temperature": 0.0}
    bodies = [body | {"messages": each, "max_tokens": new} for each in messages]
    single = Engine(
        target, drafter, rows=1, capacity=max(map(len, prompts)) + 4, specs=drafter.candidate_trees
    )
    speeds: dict[str, list[float]] = {"generate": [], "engine": [], "server": []}
    prefill, first = list[float](), list[float]()
    engine = WithoutHTTP(target, drafter, len(asked))
    with served(target, drafter, len(asked)) as ask:
        for turn in range(turns + 1):  # the first one warms up
            began = perf_counter()
            texts = generate(target, prompts, drafter, max_new_tokens=new, temperature=0.0)
            took = perf_counter() - began
            answers = ask(bodies)
            seconds, said = engine.answers(prompts, new)
            if not answers["texts"] == said == [each.text for each in texts]:
                raise ValueError("the server says something else than generate")
            tokens = sum(len(each.tokens) for each in texts)
            for arm, spent in zip(speeds.values(), (took, seconds, answers["seconds"]), strict=True):
                arm += [tokens / spent] if turn else []
        for turn in range(alone):
            i = turn % len(asked)
            began = perf_counter()
            [one] = single.admit(Request(prompts[i]))
            prefill.append(perf_counter() - began)
            single.cancel(one)
            single.free()
            first += ask([bodies[i] | {"max_tokens": 4}])["first"]
    engine.worker.close()
    above = [1000 * (a - b) for a, b in zip(first, prefill, strict=True)]
    return {
        "clients": len(asked),
        "new_tokens": tokens,
        "tokens_per_second": {name: round(median(arm), 1) for name, arm in speeds.items()},
        "turns": {name: [round(speed, 1) for speed in arm] for name, arm in speeds.items()},
        "server_over": {name: _ratio(speeds["server"], speeds[name]) for name in ("generate", "engine")},
        "prompt_tokens": median(map(len, prompts)),
        "prefill_ms": round(1000 * median(prefill), 1),
        "first_token_ms": round(1000 * median(first), 1),
        "first_token_above_prefill_ms": round(median(above), 1),
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the turns."""
    return round(median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


class WithoutHTTP:
    """The server's engine alone."""

    def __init__(self, target: HFTarget, drafter: Drafter, rows: int) -> None:
        self.target, self.left, self.done = target, 0, threading.Event()
        self.worker = Worker(target, drafter, rows, 4096, 0, self.post)
        self.worker.start()

    def post(self, updates: list[Update]) -> None:
        """Count texts that have ended."""
        self.left -= sum(update.last for update in updates)
        if not self.left:
            self.done.set()

    def answers(self, prompts: Sequence[list[int]], new: int) -> tuple[float, list[str]]:
        """Seconds, and the texts."""
        params = SamplingParams.of(self.target, new, temperature=0.0)
        requests = [params.request(0, prompt, new, streams=True) for prompt in prompts]
        self.left = len(requests)
        self.done.clear()
        began = perf_counter()
        self.worker.submit(requests)
        self.done.wait()
        return perf_counter() - began, [request.text for request in requests]


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option("JSONL file", "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    drafter: Annotated[str, cli.option("of both", "NAME")] = "auto",
    clients: Annotated[int, cli.option("at once", "N")] = 16,
    max_new_tokens: Annotated[int, cli.option("of an answer", "N")] = 64,
    turns: Annotated[int, cli.option("of all texts at once", "N")] = 5,
    alone: Annotated[int, cli.option("first tokens", "N")] = 20,
    dtype: Annotated[str, cli.option("of the target", "NAME")] = "bfloat16",
    compile: cli.Compile = False,
) -> None:
    """Compare, print, store."""
    check_writable(json, reads=questions)
    loaded = load_target(target, dtype, compile=compile)
    loaded.warm_up()
    asked = [question.turns[0] for question in load_questions(questions, clients)][:clients]
    found = compare(loaded, load_drafter(drafter, loaded, 0.0, clients), asked, max_new_tokens, turns, alone)
    write_json(json, heading(loaded) | {"drafter": drafter} | found)
    cli.out.print(found)


if __name__ == "__main__":
    run(main)
