"""Clients of a server, in a process of their own: reads a line of JSON, streams what it asks for, all at
once, and writes a line of JSON. Of the answers it looks at text alone, when all have come."""

import asyncio
import json
import sys
from time import perf_counter
from typing import Any


def request(body: dict[str, Any]) -> bytes:
    """A request for a chat's answer, as it is sent."""
    data = json.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()


def said(stream: bytes) -> str:
    """The text of a stream's events."""
    events = [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])


async def stream(host: str, port: int, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds to the first token, and the answer."""
    began, first = perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request(body))
    parts = []
    while part := await reader.read(65536):
        if not first and b'"content":' in part:
            first = perf_counter() - began
        parts.append(part)
    writer.close()
    return first, said(b"".join(parts))


async def streams(host: str, port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers to all, the seconds to the first token of each, and those that all took together."""
    began = perf_counter()
    made = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    seconds = perf_counter() - began
    return {"seconds": seconds, "first": [first for first, _ in made], "texts": [text for _, text in made]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(streams(**json.loads(line)))), flush=True)
