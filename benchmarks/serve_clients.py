"""Clients of a server, in a process of their own: reads a line of JSON, streams what it asks for, all at
once, and writes a line of JSON. Of the answers it looks at text alone, when all have come."""

import asyncio
import json
import sys
from time import perf_counter
from typing import Any


async def stream(host: str, port: int, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds to the first token, and the answer."""
    began, first, data = perf_counter(), 0.0, json.dumps(body)
    reader, writer = await asyncio.open_connection(host, port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write((head + data).encode())
    parts = []
    while part := await reader.read(65536):
        if not first and b'"content":' in part:
            first = perf_counter() - began
        parts.append(part)
    writer.close()
    lines = b"".join(parts).decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return first, "".join(choice["delta"].get("content", "") for e in events for choice in e["choices"])


async def streams(host: str, port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers to all, the seconds to the first token of each, and those that all took together."""
    began = perf_counter()
    made = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    seconds = perf_counter() - began
    return {"seconds": seconds, "first": [first for first, _ in made], "texts": [text for _, text in made]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(streams(**json.loads(line)))), flush=True)
