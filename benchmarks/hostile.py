"""A server among requests of strangers: does it live, do others wait, does memory return, does it end?

    python benchmarks/hostile.py smollm2 --json benchmarks/results/hostile.json

Starts `slipstream serve` as a process, and sends it twice every request that `hostile_requests.py` names, and
behind them `--generated` more by chance. Meanwhile three clients go on asking: one streams, one asks for a
token, one for a token within a small grammar of its own. Judged are: every answer, by its status; that the
process lives; how much longer those clients wait beside large grammars than beside as many small ones, at
most `--wait` ms; that memory (PSS of all its processes) after the second round is within 5 % of that after
the first; and that SIGTERM ends it within its grace period while it loads, idles, streams and reads a
grammar. Exit code 1 where one of them fails.
"""

import asyncio
import json as words
import math
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import typer

from common import run
from hostile_requests import (
    COMPLETIONS,
    KINDS,
    Hostile,
    bound,
    completion,
    generated,
    named,
    post,
    send,
)
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.results import Figures, heading
from slipstream.targets import load_target

WAITS = ("alone_ms", "beside_small_grammars_ms", "waits_ms")
GRAMMARS = ("deep grammars", "costly grammars")  # the kinds in which waits are judged
QUIET = 15.0  # seconds for which the clients are alone
SMALL = 150  # requests within small grammars, beside which they wait for comparison
SHARE = 0.05  # by which memory may grow
SETTLES = 60.0  # seconds in which memory must have returned
STARTS = 600.0  # seconds in which a server must be ready
MARGIN = 2.0  # seconds beyond the grace period, for the interpreter to end
SLOWEST = 10  # requests that the result names


def processes(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for path in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (path / "children").read_text().split())
    return found


def memory(pid: int) -> float:
    """MiB that its processes hold, what they share counted once."""
    total = 0
    for each in processes(pid):
        with suppress(OSError):
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1])  # type: ignore[index]
    return total / 1024


async def answer(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        head, _, body = (await asyncio.wait_for(reader.read(-1), 120)).partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body
    finally:
        writer.close()


@dataclass
class Waits:
    """What three clients waited for, in seconds: between tokens of a stream, and for small answers."""

    port: int
    model: str
    most: dict[str, float] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)

    async def beside(self, work: Any) -> dict[str, float]:
        """Ask while `work` is under way. Returns the longest waits, in ms."""
        self.most, small = {}, completion(self.model, prompt="The capital of France is", max_tokens=1)
        own = small | {"response_format": {"type": "choice", "choice": ["yes", "no"]}}
        clients = [self._stream(), self._small("answer", small), self._small("answer_in_a_grammar", own)]
        tasks = [asyncio.create_task(each) for each in clients]
        try:
            await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {name: round(1e3 * seconds, 1) for name, seconds in self.most.items()}

    def _waited(self, name: str, began: float) -> float:
        now = perf_counter()
        self.most[name] = max(self.most.get(name, 0.0), now - began)
        return now

    async def _small(self, name: str, body: dict[str, Any]) -> None:
        data = post(COMPLETIONS, body)
        while True:
            began = perf_counter()
            try:
                status, _ = await answer(self.port, data)
            except (OSError, TimeoutError) as error:
                status = 0
                self.failed[f"{name}: {type(error).__name__}"] += 1
            finally:
                self._waited(name, began)  # of a wait that the end of the work cuts off, too
            if status not in (200, 0):
                self.failed[f"{name}: status {status}"] += 1
            await asyncio.sleep(0.2)

    async def _stream(self) -> None:
        body = completion(self.model, prompt="Once upon a time", max_tokens=64, stream=True)
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(post(COMPLETIONS, body))
            last, ended = perf_counter(), b""
            try:
                while part := await reader.read(2**16):
                    last, ended = self._waited("token", last), (ended + part)[-100:]
            finally:
                self._waited("token", last)
                writer.close()
            if b"[DONE]" not in ended:
                self.failed["stream: cut off"] += 1
                await asyncio.sleep(0.2)


@dataclass
class Served:
    """A server's process."""

    process: subprocess.Popen[bytes]
    errors: Path
    port: int = 0

    def wait(self, model: str) -> int:
        """The port, once an answer comes from it. Raises ValueError."""
        until = perf_counter() + STARTS
        while perf_counter() < until and self.process.poll() is None:
            text = self.errors.read_text(errors="replace")
            if at := re.search(r"127\.0\.0\.1:(\d+)", text):
                with suppress(OSError, TimeoutError):
                    if asyncio.run(answer(int(at[1]), post(COMPLETIONS, completion(model))))[0] == 200:
                        self.port = int(at[1])
                        return self.port
            sleep(0.2)
        raise ValueError(f"the server did not start:\n{self.errors.read_text(errors='replace')[-2000:]}")

    def end(self, patience: float) -> dict[str, Any]:
        """What SIGTERM does: the seconds until it has ended, and its exit code."""
        began = perf_counter()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        seconds = round(perf_counter() - began, 1)
        return {"seconds": seconds, "exit_code": self.process.poll()}


@contextmanager
def serving(command: Sequence[str]) -> Iterator[Served]:
    """A server, which is killed in the end if it has not ended."""
    with tempfile.TemporaryDirectory() as home:
        errors = Path(home) / "errors"
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream", *command], stdout=subprocess.DEVNULL, stderr=file
            )
        try:
            yield Served(process, errors)
        finally:
            process.kill()
            process.wait()


@dataclass
class Storm:
    """Requests sent, `at_once` at a time, and what was wrong with their answers."""

    served: Served
    at_once: int
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    async def blow(self, requests: Sequence[Hostile]) -> None:
        """Send all, unless the server ends."""
        room = asyncio.Semaphore(self.at_once)

        async def one(request: Hostile) -> None:
            async with room:
                if self.served.process.poll() is not None:
                    return
                began = perf_counter()
                try:
                    status = await send(self.served.port, request, 60.0)
                    fault = request.fault(status)
                except OSError as error:
                    status, fault = 0, f"no connection: {error}"
            self.slowest.append((round(perf_counter() - began, 2), request.name[:100]))
            self.statuses[f"{request.kind}: {status}"] += 1
            if fault:
                self.faults.append({"kind": request.kind, "request": request.name[:200], "fault": fault})

        await asyncio.gather(*map(one, requests))


def rounds(model: str, count: int, seed: int) -> list[dict[str, list[Hostile]]]:
    """Requests by kind, of both rounds. The first, which warms up, has a fifth of those by chance."""
    by_kind = {kind: [each for each in named(model) if each.kind == kind] for kind in KINDS}
    return [
        by_kind | {"generated": [*generated(model, some, seed + i)]}
        for i, some in enumerate((count // 5, count))
    ]


def idle(pid: int, most: float) -> float:
    """MiB of memory once it is at most `most`, or has had its time to get there."""
    until = perf_counter() + SETTLES
    while (now := memory(pid)) > most and perf_counter() < until:
        sleep(1)
    return round(now, 1)


def storm(served: Served, model: str, count: int, seed: int, at_once: int) -> dict[str, Any]:
    """Send everything, twice."""
    waits, sent, found = Waits(served.port, model), Storm(served, at_once), dict[str, Any]()
    small = [bound(model, "choice", ["yes", "no", str(i)]) for i in range(SMALL)]
    asyncio.run(waits.beside(asyncio.sleep(QUIET)))  # their first answers start what all others use
    found["alone_ms"] = asyncio.run(waits.beside(asyncio.sleep(QUIET)))
    others = [Hostile("small grammars", f"of {SMALL}", data, wants=(200,)) for data in small]
    found["beside_small_grammars_ms"] = asyncio.run(waits.beside(sent.blow(others)))
    made, held, passed = rounds(model, count, seed), list[float](), list[dict[str, Any]]()
    for requests in made:
        passed.append({})
        for kind, some in requests.items():
            began = perf_counter()
            waited = asyncio.run(waits.beside(sent.blow(some)))
            seconds = round(perf_counter() - began, 1)
            passed[-1][kind] = {"requests": len(some), "seconds": seconds, "longest_ms": waited}
            print(kind, passed[-1][kind], f"faults: {len(sent.faults)}", flush=True)
            if served.process.poll() is not None:
                raise ValueError(f"the server ended among {kind}, exit code {served.process.poll()}")
        sleep(5)
        held.append(idle(served.process.pid, held[0] * (1 + SHARE) if held else math.inf))
    found |= {"rounds": passed, "memory_mib": held, "statuses": dict(sorted(sent.statuses.items()))}
    found |= {"faults": sent.faults, "failed_clients": dict(waits.failed)}
    return found | {"slowest": sorted(sent.slowest, reverse=True)[:SLOWEST]}


def longest_waits(found: dict[str, Any]) -> dict[str, float]:
    """By how many ms others' grammars made each client wait longer than as many small ones do."""
    small, each = found["beside_small_grammars_ms"], dict[str, float]()
    for passed in found["rounds"]:
        for kind in GRAMMARS:
            for name, ms in passed.get(kind, {}).get("longest_ms", {}).items():
                each[name] = round(max(each.get(name, 0.0), ms - small[name]), 1)
    return each


def ends(command: Sequence[str], model: str, grace: float) -> dict[str, dict[str, Any]]:
    """What SIGTERM does to a server that loads, streams, or reads a grammar."""
    found, patience = dict[str, dict[str, Any]](), grace + 30
    for seconds in (1, 4):
        with serving(command) as served:
            sleep(seconds)
            found[f"loading for {seconds} s"] = served.end(patience)
    stream = completion(model, prompt="Once upon a time", max_tokens=900, stream=True)
    grammar = {"type": "integer", "multipleOf": 123456789}
    for state, data in (
        ("streaming", post(COMPLETIONS, stream)),
        ("reading a grammar", bound(model, "json_schema", grammar)),
    ):
        with serving(command) as served:
            served.wait(model)
            found[state] = asyncio.run(_ends_beside(served, data, patience))
    return found


async def _ends_beside(served: Served, data: bytes, patience: float) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
    await asyncio.sleep(1)

    async def reads() -> None:
        while await reader.read(2**16):
            pass

    task = asyncio.create_task(reads())
    try:
        return await asyncio.to_thread(served.end, patience)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


def judged(found: dict[str, Any], wait: float, grace: float) -> dict[str, bool]:
    """What must hold, and whether it does."""
    before, after = found["memory_mib"]
    late = [each for each in found["sigterm"].values() if each["seconds"] > grace + MARGIN]
    return {
        "every answer is right": not found["faults"],
        "the server lives": found["lives"],
        "no other client fails": not found["failed_clients"],
        f"nobody waits {wait:g} ms for another's grammar": max(longest_waits(found).values()) <= wait,
        "memory returns": after <= before * (1 + SHARE),
        "SIGTERM ends it in time": not late,
    }


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    generated: Annotated[int, cli.option("requests by chance", "N")] = 1500,
    seed: Annotated[int, cli.option("of those", "N")] = 0,
    at_once: Annotated[int, cli.option("requests under way", "N")] = 8,
    wait: Annotated[float, cli.option("that a client may wait for another's grammar", "MS")] = 250.0,
    grace: Annotated[int, cli.option("of the server", "S")] = 5,
    drafter: Annotated[str, cli.option("of the server", "NAME")] = "ngram",
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
) -> None:
    """Send, watch, judge."""
    check_writable(json)
    command = ["serve", "--target", target, "--dtype", dtype, "--drafter", drafter, "--port", "0"]
    command += ["--max-context", "1024", "--max-seconds", "30", "--grace", str(grace)]
    command += ["--keep", "1024"]  # tokens, which the first round fills
    with serving(command) as served:
        served.wait(target)
        found = storm(served, target, generated, seed, at_once)
        found["lives"] = served.process.poll() is None
        found["sigterm"] = {"idle": served.end(grace + 30)}
        found["said"] = Counter(
            line.partition(":")[0][:100]
            for line in served.errors.read_text(errors="replace").splitlines()
            if "Traceback" in line or "ERROR" in line
        )
    found["sigterm"] |= ends(command, target, grace)
    found["waits_ms"] = longest_waits(found)
    found["holds"] = judged(found, wait, grace)
    loaded = load_target(target, dtype)
    write_json(json, heading(loaded) | {"drafter": drafter, "at_once": at_once, "grace": grace} | found)
    for name in (*WAITS, "memory_mib", "failed_clients", "slowest", "said"):
        print(name, words.dumps(found[name]))
    for each in found["faults"][:40]:
        print(words.dumps(each))
    table = Figures(f"{target} among hostile requests", "what must hold", "")
    for name, ok in found["holds"].items():
        table.add_row(name, "yes" if ok else "no")
    for name, each in found["sigterm"].items():
        table.add_row(f"SIGTERM, {name}", f"{each['seconds']} s, exit code {each['exit_code']}")
    cli.out.print(table)
    if not all(found["holds"].values()):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
