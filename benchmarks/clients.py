"""Many clients of a running server, of whom some leave, break off or read slowly: is anything lost?

    python benchmarks/clients.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/clients.json

Starts `slipstream serve` as a process, and lets `--clients` ask it `--requests` times each, one request after
the other: for a whole answer, for a stream, for a stream that is read slowly, for a stream that is left after
its first events, or with a connection that is reset in the midst of the request or of the answer. A client
that is told to come again does. Each answer must be what `generate` says alone, by plain decoding. In the end
no row may be taken, and SIGTERM must end the server with exit code 0.
"""

import asyncio
import json as words
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any

import typer

from common import run
from serve_clients import request, said
from slipstream import generate
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.measure.datasets import load_questions
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

WAYS = {"whole": 7, "stream": 6, "slow": 2, "leaves": 3, "resets": 2}  # and how often each comes
SHORTEST, LONGEST = 4, 24  # tokens of an answer
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]
DIFFERENT = 60  # requests, of which all are copies
LOOKS = 4  # at the process's memory, evenly over the finished requests
AT_MOST = 1800.0  # seconds


@dataclass
class Clients:
    """What they ask, and what they got."""

    port: int
    pid: int
    bodies: list[dict[str, Any]]
    total: int
    said: list[tuple[int, str]] = field(default_factory=list)  # which body, and its answer
    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    again: int = 0
    memory: list[int] = field(default_factory=list)

    async def client(self, number: int, requests: int) -> None:
        """One client's requests."""
        chance = random.Random(number)
        for _ in range(requests):
            [way] = chance.choices(list(WAYS), list(WAYS.values()))
            which = chance.randrange(len(self.bodies))
            while (status := await self._ask(which, way, chance)) == 429:
                self.again += 1
                await asyncio.sleep(0.2 + chance.random())
            if status not in (None, 200):
                self.faults[f"status {status}"] += 1
            self.ended[way] += 1
            if self.ended.total() * LOOKS // self.total > len(self.memory):
                self.memory.append(resident(self.pid))

    async def _ask(self, which: int, way: str, chance: random.Random) -> int | None:
        """The answer's status; None where nobody waited for it."""
        streams = way != "whole"
        sent = request(self.bodies[which] | {"stream": streams})
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            early = way == "resets" and chance.random() < 0.5
            writer.write(sent[: len(sent) // 2] if early else sent)
            await writer.drain()
            if way in ("leaves", "resets"):
                if not early:
                    await reader.read(chance.choice((1, 300, 900)))
                if way == "resets":
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return None
            parts = []
            while part := await reader.read(256 if way == "slow" else 65536):
                parts.append(part)
                if way == "slow":
                    await asyncio.sleep(0.05)
            status, text = parsed(b"".join(parts), streams)
            if status == 200:
                self.said.append((which, text))
            return status
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def parsed(answer: bytes, streamed: bool) -> tuple[int, str]:
    """Status and text of an answer; status 0 for one that was cut off."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    if status != 200:
        return status, ""
    if not streamed:
        return status, words.loads(body)["choices"][0]["message"]["content"]
    return (status, said(body)) if b"data: [DONE]" in body else (0, "")


def resident(pid: int) -> int:
    """MiB of a process's memory."""
    with open(f"/proc/{pid}/statm") as pages:
        return int(pages.read().split()[1]) // 256


def busy(port: int) -> dict[str, int]:
    """Texts that run and wait."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: line.recv(65536), b"")).decode()
    names = ("running", "waiting")
    return {name: int(float(re.findall(rf"requests_{name} (\S+)", text)[-1])) for name in names}


def asked(target: HFTarget, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Different requests."""
    chance, made = random.Random(0), []
    for i in range(DIFFERENT):
        messages = [{"role": "user", "content": texts[i % len(texts)]}]
        body = {"model": target.name, "messages": messages, "seed": i}
        made.append(body | SETTINGS[i % len(SETTINGS)] | {"max_tokens": chance.randint(SHORTEST, LONGEST)})
    return made


def alone(target: HFTarget, body: dict[str, Any]) -> str:
    """What plain decoding says to a request."""
    how = {
        name: body[name] for name in ("temperature", "top_p", "repetition_penalty", "seed") if name in body
    }
    made = generate(target, body["messages"], "vanilla", max_new_tokens=body["max_tokens"], **how)
    return str(made.text)


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    questions: Annotated[list[str], cli.option("whose first turns are asked; repeat it", "FILE")],
    clients: Annotated[int, cli.option("at once", "N")] = 100,
    requests: Annotated[int, cli.option("of each client", "N")] = 10,
    rows: Annotated[int, cli.option("of the server", "N")] = 16,
    drafter: Annotated[str, cli.option("of the server", "NAME")] = "auto",
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
) -> None:
    """Ask, compare and print."""
    check_writable(json)
    loaded = load_target(target, dtype)
    bodies = asked(loaded, [str(each.turns[0]) for each in load_questions(questions, 8)])
    command = ["serve", "--target", target, "--dtype", dtype, "--drafter", drafter, "--port", "0"]
    started = [sys.executable, "-m", "slipstream", *command, "--rows", str(rows), "--queue", str(2 * rows)]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            ports = (int(at[1]) for line in lines if (at := re.search(r"127\.0\.0\.1:(\d+)", line)))
            if (port := next(ports, None)) is None:
                raise ValueError(f"the server did not start: slipstream {' '.join(command)}")
            crowd = Clients(port, server.pid, bodies, clients * requests)

            async def all_of_them() -> None:
                await asyncio.gather(*(crowd.client(i, requests) for i in range(clients)))

            began = perf_counter()
            asyncio.run(asyncio.wait_for(all_of_them(), AT_MOST))
            seconds = perf_counter() - began
            left = busy(port)
        except BaseException:
            server.kill()  # leaving `with` waits for it
            raise
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    want = [alone(loaded, body) for body in bodies]
    found = {
        "clients": clients,
        "requests": dict(crowd.ended),
        "answers": len(crowd.said),
        "as_alone": sum(text == want[which] for which, text in crowd.said),
        "told_to_come_again": crowd.again,
        "faults": dict(crowd.faults),
        "left": left,
        "memory_mib": crowd.memory,
        "exit_code": server.returncode,
        "seconds": round(seconds, 1),
    }
    write_json(json, heading(loaded) | {"drafter": drafter, "rows": rows} | found)
    table = Figures(f"{clients} clients, {requests} requests each", "what", "")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), str(value))
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
