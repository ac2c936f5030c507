"""Requests that a stranger may send a server, by kind, with what may be answered; and a client."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from slipstream.serve.schema import ChatCompletion, Completion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED = range(400, 500)
UNDER_WAY = (503, 504)  # what a server may say of itself
OUT_OF_TIME = -1  # in the place of a status: no answer came
NEW = 3  # tokens of an answer, at most

Json = Any


class Hostile(NamedTuple):
    """A request.

    Attributes:
        data: what is sent, as bytes.
        way: how, and what the client does then: see `WAYS`.
        wants: the statuses of a right answer; empty: any that is no fault of the server's own.
    """

    kind: str
    name: str
    data: bytes
    way: str = "whole"
    wants: tuple[int, ...] | range = ()

    def fault(self, status: int) -> str | None:
        """What is wrong with the answer; status 0 is a connection that was closed without one."""
        if status == OUT_OF_TIME:
            return None if self.way in LEAVING else "no answer"
        if status >= 500 and status not in UNDER_WAY:
            return f"status {status}"
        if self.wants and status and status not in self.wants:
            return f"status {status}, not of {self.wants}"
        return None


LEAVING = ("leaves", "resets", "slow", "stalls")
WAYS = ("whole", "half-closed", "pieces", *LEAVING)


def post(path: str, body: Any, *lines: str, host: str = "127.0.0.1") -> bytes:
    """A request as it is sent. `body` is bytes, or written as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    named = {line.partition(":")[0].lower() for line in lines}
    head = [f"POST {path} HTTP/1.1", *lines]
    if "connection" not in named:
        head.append("Connection: close")
    for name, value in (("Host", host), ("Content-Type", "application/json"), ("Content-Length", len(data))):
        if name.lower() not in named and not (name == "Content-Length" and "transfer-encoding" in named):
            head.append(f"{name}: {value}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + data


def get(path: str, *lines: str, method: str = "GET", host: str = "Host: 127.0.0.1") -> bytes:
    """A request without a body."""
    head = [f"{method} {path} HTTP/1.1", host, *lines, "Connection: close"]
    return "\r\n".join([*filter(None, head), "", ""]).encode("latin-1")


def completion(model: str, **fields: Any) -> dict[str, Any]:
    """The body of a small completion."""
    return {"model": model, "prompt": "a", "max_tokens": NEW, "temperature": 0.0} | fields


def chatting(model: str, **fields: Any) -> dict[str, Any]:
    """The body of a small chat."""
    messages = [{"role": "user", "content": "a"}]
    return {"model": model, "messages": messages, "max_tokens": NEW, "temperature": 0.0} | fields


def bound(model: str, kind: str, value: Any) -> bytes:
    """A completion within a grammar."""
    field = {"schema": value} if kind == "json_schema" else value
    return post(COMPLETIONS, completion(model, response_format={"type": kind, kind: field}))


# Grammars


def nested(depth: int, wrap: Callable[[Json], Json]) -> Json:
    """`wrap` of itself, so deep."""
    made: Json = {"type": "integer"}
    for _ in range(depth):
        made = wrap(made)
    return made


def referring(count: int, wrap: Callable[[Json], Json] = lambda to: to) -> Json:
    """Definitions of which each refers to the next."""
    defs = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "integer"}}}


def rules(count: int, first: str, line: str, last: str) -> str:
    """Rules or terminals of which each names the next."""
    lines = [line.format(i, i + 1) for i in range(count)]
    return "\n".join([first.format(0), *lines, last.format(count)])


def deep(model: str) -> Iterator[Hostile]:
    """Grammars that lead one thing through another."""
    text: dict[str, str] = {}
    schema: dict[str, Json] = {}
    for count in (400, 4000, 12000):
        schema[f"$defs {count} deep"] = referring(count)
        schema[f"$defs of arrays {count} deep"] = referring(count, lambda to: {"type": "array", "items": to})
        schema[f"$defs of anyOf {count} deep"] = referring(count, lambda to: {"anyOf": [to, {"const": 1}]})
        text[f"Lark rules {count} deep"] = rules(count, "start: r{}", "r{}: r{}", 'r{}: "a"')
        text[f"Lark terminals {count} deep"] = rules(count, "start: T{}", "T{}: T{}", 'T{}: "a"')
        text[f"GBNF rules {count} deep"] = rules(count, "root ::= r{}", "r{} ::= r{}", 'r{} ::= "a"')
        text[f"Lark brackets {count} deep"] = f'start: {"(" * count}"a"{")" * count}'
        text[f"GBNF brackets {count} deep"] = f'root ::= {"(" * count}"a"{")" * count}'
    for depth in (120, 300):  # json.dumps itself ends before a thousand
        schema[f"properties {depth} deep"] = nested(
            depth, lambda of: {"type": "object", "properties": {"a": of}, "required": ["a"]}
        )
        schema[f"items {depth} deep"] = nested(depth, lambda of: {"type": "array", "items": of})
        schema[f"anyOf {depth} deep"] = nested(depth, lambda of: {"anyOf": [of, {"const": 1}]})
        schema[f"allOf {depth} deep"] = nested(depth, lambda of: {"allOf": [of, {"minimum": 1}]})
        schema[f"not {depth} deep"] = nested(depth, lambda of: {"not": of})
    for name, made in schema.items():
        yield Hostile("deep grammars", name, bound(model, "json_schema", made))
    for name, grammar in text.items():
        yield Hostile("deep grammars", name, bound(model, "grammar", grammar))
    for depth in (1000, 50000):
        pattern = "(" * depth + "a" + ")" * depth
        yield Hostile("deep grammars", f"brackets of a regex {depth} deep", bound(model, "regex", pattern))
        lines = f'{{"model": "{model}", "prompt": "a", "response_format": {"[" * depth}{"]" * depth}}}'
        yield Hostile("deep grammars", f"JSON {depth} deep", post(COMPLETIONS, lines.encode()), wants=REFUSED)


PATTERNS = {
    "200,000 letters": "a" * 200_000,
    "counts of counts of counts": "((a{100}){100}){100}",
    "20,000 optional letters": "a?" * 20_000,
    "a count of a thousand million": "a{1000000000}",
    "a range of counts": "(a|b){1,100000}",
    "a window of a word": ".*a.{400}",
    "many stars": "(.*a){300}",
    "stars of stars": "((((a*)*)*)*)*",
    "5,000 alternatives": "|".join(f"w{i}x{i * 7919 % 5003}" for i in range(5000)),
    "all of Unicode, counted": r"(\p{L}|\p{N}){1,2000}",
    "a lookahead": "(?=a)b",
    "a back reference": r"(a)\1",
    "an empty one": "",
    "of nothing": "[^\\s\\S]",
    "not closed": "(((",
    "a NUL": "a\0b",
    "half a surrogate": "\ud800",
}

SCHEMAS: dict[str, Callable[[], Json]] = {
    "multipleOf 123456789": lambda: {"type": "integer", "multipleOf": 123456789},
    "multipleOf 2**62": lambda: {"type": "integer", "multipleOf": 2**62},
    "multipleOf 1e-9": lambda: {"type": "number", "multipleOf": 1e-9},
    "multipleOf 1e300": lambda: {"type": "number", "multipleOf": 1e300},
    "multipleOf of two primes": lambda: {
        "type": "integer", "allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]
    },
    "multipleOf twenty primes": lambda: {
        "type": "integer",
        "allOf": [{"multipleOf": n} for n in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)],
    },
    "5,000 optional properties": lambda: {
        "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
        "additionalProperties": False,
    },
    "5,000 properties": lambda: {
        "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)},
        "required": [f"p{i}" for i in range(5000)],
    },
    "an enum of 20,000": lambda: {"enum": [f"v{i}" for i in range(20_000)]},
    "anyOf 3,000 objects": lambda: {
        "anyOf": [{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(3000)]
    },
    "maxLength 10**9": lambda: {"type": "string", "maxLength": 10**9},
    "minLength 10**6": lambda: {"type": "string", "minLength": 10**6},
    "minItems 10**9": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "maxItems 10**6": lambda: {"type": "array", "items": {"type": "integer"}, "maxItems": 10**6},
    "prefixItems 20,000": lambda: {"type": "array", "prefixItems": [{"type": "integer"}] * 20_000},
    "maximum of 400 digits": lambda: {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    "a range of floats": lambda: {"type": "number", "minimum": 1.000000000000001, "maximum": 1.7e308},
    "patternProperties 500": lambda: {
        "type": "object", "patternProperties": {f".*{i}.*": {"type": "integer"} for i in range(500)}
    },
    "a pattern that is long": lambda: {"type": "string", "pattern": "a?" * 20_000},
    "two patterns at once": lambda: {
        "allOf": [{"type": "string", "pattern": f"^(.*{c}){{40}}$"} for c in "abc"]
    },
    "a circle": lambda: {
        "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    },
    "itself": lambda: {"$ref": "#"},
    "itself in a product": lambda: {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "doubling": lambda: {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
            "d30": {"type": "integer"},
        },
    },
    "doubling objects": lambda: {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{
                f"d{i}": {
                    "type": "object", "required": ["a", "b"],
                    "properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "ab"},
                }
                for i in range(40)
            },
            "d40": {"const": 1},
        },
    },
    "a reference to the network": lambda: {"$ref": "http://127.0.0.1:9/schema"},
    "a reference to a file": lambda: {"$ref": "file:///etc/passwd"},
    "a reference to nothing": lambda: {"$ref": "#/$defs/nothing"},
    "a megabyte of description": lambda: {"type": "integer", "description": "a" * 900_000},
    "false": lambda: {"not": {}},
    "no schema": lambda: {"type": 7, "properties": [], "required": "a"},
}  # fmt: skip

GRAMMARS = {
    "left recursion": 'start: start "a" | "a"',
    "ambiguity": 'start: start start | "a" | "b"',
    "never ends": 'start: "a" start',
    "a count of a million": 'start: "a"{1000000}',
    "counts of counts": "start: a{100}\na: b{100}\nb: c{100}\nc: /x/",
    "a terminal of counts": "start: /((a{100}){100}){100}/",
    "a thousand terminals": "start: "
    + " | ".join(f"T{i}" for i in range(1000))
    + "\n"
    + "\n".join(f"T{i}: /a*b{{{i}}}/" for i in range(1000)),
    "an empty rule": 'start: a* "x"\na: b*\nb: ',
    "no start": 'a: "a"',
    "garbage": "\x00\x01%%%{{{",
    "an import": "%import common.NUMBER\nstart: NUMBER",
    "JSON inside": 'start: %json {"type": "integer", "multipleOf": 123456789}',
    "GBNF of counts": "root ::= a{1000}\na ::= b{1000}\nb ::= [a-z]{1000}",
}


def costly(model: str) -> Iterator[Hostile]:
    """Grammars that take long to read, or to walk through."""
    for name, pattern in PATTERNS.items():
        yield Hostile("costly grammars", f"a regex: {name}", bound(model, "regex", pattern))
    for name, make in SCHEMAS.items():
        yield Hostile("costly grammars", f"a schema: {name}", bound(model, "json_schema", make()))
    for name, grammar in GRAMMARS.items():
        yield Hostile("costly grammars", f"a grammar: {name}", bound(model, "grammar", grammar))
    choices = [f"choice {i}" for i in range(40_000)]
    yield Hostile("costly grammars", "40,000 choices", bound(model, "choice", choices))
    left = bound(model, "json_schema", SCHEMAS["multipleOf 123456789"]())
    for way in ("leaves", "resets", "half-closed"):
        yield Hostile("costly grammars", f"multipleOf 123456789: the client {way}", left, way)


# Prompts and bodies


def prompts(model: str) -> Iterator[Hostile]:
    """Texts and tokens that are many, long or none."""
    bad: dict[str, Any] = {
        "100,000 prompts": ["a"] * 100_000,
        "100,000 empty prompts": [""] * 100_000,
        "100,000 prompts of a token": [[1]] * 100_000,
        "300,000 tokens": [1] * 300_000,
        "a megabyte of text": "word " * 200_000,
        "a megabyte of one letter": "a" * 1_000_000,
        "a megabyte of spaces": " " * 1_000_000,
        "no prompt": [],
        "an empty prompt": [[]],
        "a token that is none": [2**31],
        "a token below zero": [-1],
        "a token beyond 64 bits": [2**70],
        "a token that is true": [True],
        "text beside tokens": ["a", [1]],
        "half a surrogate": "\ud800",
    }
    for name, prompt in bad.items():
        yield Hostile("prompts", name, post(COMPLETIONS, completion(model, prompt=prompt)), wants=REFUSED)
    for name, prompt in (("NUL", "a\0b"), ("special tokens", "<|im_end|>" * 50), ("marks", "é̂" * 200)):
        yield Hostile("prompts", name, post(COMPLETIONS, completion(model, prompt=prompt)))
    for n in (10**4, 10**9, 2**70):
        yield Hostile("prompts", f"n = {n}", post(COMPLETIONS, completion(model, n=n)), wants=REFUSED)
    many = [{"role": "user", "content": "a"}] * 20_000
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    for name, messages in (("20,000 messages", many), ("20,000 parts", parts), ("an image", image)):
        yield Hostile("prompts", name, post(CHAT, chatting(model, messages=messages)), wants=REFUSED)
    stops = ["a" * 1000] * 900
    yield Hostile("prompts", "900 stop strings", post(CHAT, chatting(model, stop=stops)), wants=REFUSED)
    bias = {str(i): 1.0 for i in range(40_000)}
    yield Hostile("prompts", "40,000 biases", post(CHAT, chatting(model, logit_bias=bias)))


def bodies(model: str) -> Iterator[Hostile]:
    """Bodies that are no requests, and heads that lie about them."""
    good = json.dumps(completion(model)).encode()
    bad = {
        "empty": b"",
        "no JSON": b"hello",
        "half of JSON": good[:-2],
        "a comma too many": good[:-1] + b",}",
        "NaN": good[:-1] + b', "top_p": NaN}',
        "infinity": good[:-1] + b', "top_p": -Infinity}',
        "a number of 100,000 digits": good[:-1] + b', "seed": ' + b"9" * 100_000 + b"}",
        "400,000 brackets": b"[" * 400_000,
        "a list": b"[]",
        "a text": b'"a"',
        "null": b"null",
        "a number": b"7",
        "invalid UTF-8": good[:-1] + b', "user": "\xff\xfe"}',
        "UTF-8 that is too long": good[:-1] + b', "user": "\xc0\xaf"}',
        "compressed": bytes.fromhex("1f8b0800000000000003") + good,
        "NULs": b"\0" * 10_000,
        "100,000 fields": json.dumps({f"f{i}": i for i in range(50_000)}).encode(),
    }
    for name, body in bad.items():
        for path in (COMPLETIONS, CHAT):
            yield Hostile("bodies", f"{name}, {path}", post(path, body), wants=REFUSED)
    big = b" " * (2**20 + 1)
    yield Hostile("bodies", "a byte too many", post(COMPLETIONS, big), wants=(413,))
    chunk = f"{len(big):x}\r\n".encode() + big + b"\r\n0\r\n\r\n"
    chunked = post(COMPLETIONS, chunk, "Transfer-Encoding: chunked")
    yield Hostile("bodies", "a byte too many, in chunks", chunked, wants=(408, 413))
    lies = {
        "a length that is no number": "Content-Length: abc",
        "a length below zero": "Content-Length: -1",
        "a length of 30 digits": "Content-Length: " + "9" * 30,
        "a length of 5,000 digits": "Content-Length: " + "9" * 5000,
        "a length that is empty": "Content-Length: ",
        "two lengths": "Content-Length: 5\r\nContent-Length: 7",
        "a length and chunks": "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "chunks that are none": "Transfer-Encoding: chunked",
        "an encoding that is none": "Transfer-Encoding: identity, gzip",
        "a wrong type": "Content-Type: text/plain",
        "a form": "Content-Type: multipart/form-data; boundary=a",
        "a broken type": "Content-Type: application/json; charset=\x80",
        "compression": "Content-Encoding: gzip",
        "something expected": "Expect: 200-ok",
        "an upgrade": "Connection: Upgrade\r\nUpgrade: websocket",
    }
    for name, line in lies.items():
        yield Hostile("bodies", name, post(COMPLETIONS, good, line), "half-closed")
    short = post(COMPLETIONS, good, f"Content-Length: {len(good) + 10}")
    for way in ("half-closed", "leaves", "resets", "stalls"):
        yield Hostile("bodies", f"a body that is too short: {way}", short, way)
    longer = post(COMPLETIONS, good + b"GET / HTTP/1.1\r\n\r\n", f"Content-Length: {len(good)}")
    yield Hostile("bodies", "a body that is too long", longer)


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**70, 0.5, -1e308, "", "a", "\ud800\0", [], [None], [[[]]], {},
    {"a": {"b": []}},
)  # fmt: skip


def fields(model: str) -> Iterator[Hostile]:
    """Every field, with a value of every type."""
    for path, kind, base in ((COMPLETIONS, Completion, completion), (CHAT, ChatCompletion, chatting)):
        for field in kind.model_fields:
            for value in VALUES:
                body = base(model) | {field: value}
                if field in ("max_tokens", "max_completion_tokens"):
                    body = {"max_tokens": None} | body  # one of them
                streams = body.get("stream") is True
                name = f"{path} {field} = {json.dumps(value)}"
                yield Hostile("fields", name, post(path, body), "leaves" if streams else "whole")


# Hosts and connections


def hosts(model: str) -> Iterator[Hostile]:
    """Pages of the internet that reach a server on the loopback by another name."""
    asked = post(COMPLETIONS, completion(model))
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"):
        for sent in (
            post(COMPLETIONS, completion(model), host=host),
            get("/v1/models", host=f"Host: {host}"),
        ):
            yield Hostile("hosts", f"{host}: {sent[:4].decode()}", sent, wants=REFUSED)
    for origin in ("http://evil.example", "https://127.0.0.1.evil.example", "null"):
        sent = post(COMPLETIONS, completion(model), f"Origin: {origin}")
        yield Hostile("hosts", f"Origin {origin}", sent, wants=REFUSED)
    odd = ("", "Host: ", "Host: a b", "Host: [::1", "Host: 127.0.0.1:99999999", "Host: @", "Host: \xff")
    for line in (*odd, "Host: 127.0.0.1\r\nHost: evil.example", "Host: evil.example\r\nHost: 127.0.0.1"):
        yield Hostile("hosts", f"{line!r}", get("/v1/models", host=line))
    away = asked.replace(b"POST /v1", b"POST http://evil.example/v1", 1)
    yield Hostile("hosts", "a whole address", away)


def connections(model: str) -> Iterator[Hostile]:
    """Clients that speak another protocol, half a one, or leave in the midst."""
    good, long = completion(model), completion(model, max_tokens=64, stream=True)
    spoken = {
        "nothing": b"",
        "a line end": b"\r\n" * 1000,
        "noise": random.Random(0).randbytes(5000),
        "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(200),
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n",
        "no path": b"GET  HTTP/1.1\r\n\r\n",
        "a path of 100,000 bytes": get("/" + "a" * 100_000),
        "10,000 headers": get("/health", *[f"H{i}: a" for i in range(10_000)]),
        "a header of 200,000 bytes": get("/health", "H: " + "a" * 200_000),
        "a header with NUL": get("/health", "H: a\0b"),
        "a header without a colon": get("/health", "nothing"),
        "a header that is folded": get("/health", "H: a\r\n b"),
        "a method that is none": get("/health", method="HACK"),
        "TRACE": get("/health", method="TRACE"),
        "CONNECT": get("127.0.0.1:1", method="CONNECT"),
        "OPTIONS": get("*", method="OPTIONS"),
        "PUT": get("/v1/completions", method="PUT"),
        "a file": get("/v1/models/../../../../etc/passwd"),
        "a file, encoded": get("/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
        "NUL in a path": get("/v1/models/%00"),
        "bytes in a path": get("/v1/models/%ff%fe"),
        "a query of 60,000 bytes": get("/health?" + "a=b&" * 15_000),
    }
    for name, data in spoken.items():
        yield Hostile("connections", name, data, "half-closed")
    for way in WAYS:
        yield Hostile("connections", f"an answer: {way}", post(COMPLETIONS, good), way)
        yield Hostile("connections", f"a stream: {way}", post(COMPLETIONS, long), way)
        half = post(COMPLETIONS, long)[:-40]
        if way not in ("whole", "pieces"):
            yield Hostile("connections", f"half a request: {way}", half, way)
            yield Hostile("connections", f"half a head: {way}", half[:50], way)
    again = post(COMPLETIONS, good, "Connection: keep-alive")
    alive = get("/health").replace(b"Connection: close\r\n", b"")
    for name, line in (("answers", [again] * 10), ("signs of life", [alive] * 100)):
        for way in ("half-closed", "leaves", "resets"):
            yield Hostile(
                "connections", f"many {name} in one piece: {way}", b"".join([*line, get("/health")]), way
            )


KINDS: dict[str, Callable[[str], Iterator[Hostile]]] = {
    "deep grammars": deep,
    "costly grammars": costly,
    "prompts": prompts,
    "bodies": bodies,
    "fields": fields,
    "hosts": hosts,
    "connections": connections,
}


@cache
def named(model: str) -> tuple[Hostile, ...]:
    """Every request above."""
    return tuple(chain.from_iterable(make(model) for make in KINDS.values()))


# Requests by chance


def _value(chance: random.Random, depth: int = 3) -> Any:
    """A value of JSON."""
    kind = chance.randrange(9 if depth else 7)
    if kind == 7:
        return [_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 8:
        return {_word(chance): _value(chance, depth - 1) for _ in range(chance.randrange(4))}
    numbers = (chance.randint(-3, 3), chance.randint(-(2**80), 2**80), chance.uniform(-2, 2), 1e300)
    return (None, True, False, *numbers[:3], _word(chance))[kind] if kind else chance.choice(numbers)


def _word(chance: random.Random) -> str:
    letters = "ab\"'\\\0\n {}[]()|*+?^$.é日😀\ud800"
    return "".join(chance.choices(letters, k=chance.choice((0, 1, 3, 30))))


def _schema(chance: random.Random, depth: int = 4) -> Json:
    """A schema, right or nearly."""
    if not depth or chance.random() < 0.1:
        return chance.choice(
            ({}, True, False, {"$ref": "#"}, {"$ref": "#/$defs/x"}, {"const": _value(chance)})
        )
    size, inner = chance.choice((0, 1, 2, 7, 1000, 10**6, -1)), lambda: _schema(chance, depth - 1)
    several = [inner() for _ in range(chance.randint(1, 3))]
    first, word = several[0], _pattern(chance)
    return chance.choice(
        (
            {"type": "integer", "multipleOf": chance.choice((0, 3, 1000, 99991, 2**40)), "minimum": size},
            {"type": "number", "minimum": _value(chance, 0), "exclusiveMaximum": size},
            {"type": "string", "minLength": size, "maxLength": chance.choice((5, 10**5))},
            {"type": "string", "pattern": word},
            {"type": "string", "format": chance.choice(("date", "email", "uri", "uuid", "ipv6", "no"))},
            {"type": "array", "items": first, "minItems": size, "maxItems": chance.choice((3, 10**5))},
            {"type": "object", "properties": dict(zip("abc", several, strict=False)), "required": ["a"]},
            {"type": "object", "patternProperties": {word: first}, "additionalProperties": several[-1]},
            {chance.choice(("anyOf", "allOf", "oneOf", "prefixItems")): several},
            {"enum": [_value(chance) for _ in range(size % 50)]},
            {chance.choice(("not", "if", "contains", "propertyNames", "$defs", "type")): first},
        )
    )


def _pattern(chance: random.Random) -> str:
    """A regular expression, right or nearly."""
    pieces = ["a", "b", ".", r"\d", r"\w", r"\p{L}", "[^a-z]", "(a|b)", "(", ")", "[", "*", "+", "?", "|"]
    pieces += ("{2}", "{3,40}", "{1000}", "{5,}", "^", "$", r"\b", "(?=a)", "é", "(?i)")
    return "".join(chance.choices(pieces, k=chance.choice((1, 4, 12, 60))))


def _grammar(chance: random.Random) -> str:
    """A grammar in Lark's form, right or nearly."""
    names = ["start", *(f"r{i}" for i in range(chance.randint(1, 30)))]
    pieces = ('"a"', '"b"', "/[a-z]+/", "(", ")", "|", "*", "+", "?", "{3}", "{2,500}", *names)
    return "\n".join(f"{name}: {' '.join(chance.choices(pieces, k=chance.randint(1, 8)))}" for name in names)


def _broken(chance: random.Random, data: bytes) -> bytes:
    """Bytes changed, left out or doubled."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at, length = chance.randrange(len(made)), chance.choice((1, 1, 4, 30))
        made[at : at + length] = chance.choice(
            (b"", chance.randbytes(length), bytes(made[at : at + length]) * 2, b"\r\n", b'"', b"\0")
        )
    return bytes(made)


def _changed(chance: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A route and a body some of whose fields hold anything."""
    path, kind, base = chance.choice(
        ((COMPLETIONS, Completion, completion), (CHAT, ChatCompletion, chatting))
    )
    names = [*(set(kind.model_fields) - {"model", "max_tokens", "max_completion_tokens", "n"}), "x"]
    body = base(model) | {name: _value(chance) for name in chance.sample(sorted(names), chance.randint(1, 3))}
    if chance.random() < 0.2:
        del body[chance.choice(list(body))]
    return path, {"max_tokens": NEW} | body


def generated(model: str, count: int, seed: int) -> Iterator[Hostile]:
    """`count` requests by chance, the same for the same seed."""
    chance = random.Random(seed)
    for i in range(count):
        path, body = _changed(chance, model)
        data, way = post(path, body), "leaves" if body.get("stream") else "whole"
        what = chance.choice(("json_schema", "regex", "grammar", "fields", "broken body", "broken", "way"))
        if what in ("json_schema", "regex", "grammar"):
            make = {"json_schema": _schema, "regex": _pattern, "grammar": _grammar}[what]
            value = make(chance)
            data, way = bound(model, what, value), chance.choice(("whole", "whole", "whole", "leaves"))
        elif what == "broken body":
            data = post(path, _broken(chance, json.dumps(body).encode()))
        elif what == "broken":
            data, way = _broken(chance, data), "half-closed"
        elif what == "way":
            way = chance.choice([way for way in WAYS if way != "stalls"])
            data = post(path, body | {"stream": chance.random() < 0.5})
            way = "leaves" if way == "whole" else way
        yield Hostile("generated", f"{i} of seed {seed}: {what}", data, way)


# A client


async def send(port: int, request: Hostile, seconds: float = 30.0) -> int:
    """Send it, and behave as its way says. Returns the status of the first answer; 0: the server closed the
    connection without one; `OUT_OF_TIME`: none came in that time, or the client left before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = bytearray()
    try:
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):  # the server may close while this client still sends
                await _spoken(writer, request)
            with suppress(ConnectionError):
                await _heard(reader, writer, request, heard)
    except TimeoutError:
        if not heard:
            return OUT_OF_TIME
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1)
    if not heard:
        return OUT_OF_TIME if request.way in LEAVING else 0
    words = bytes(heard[:64]).split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1][:3].isdigit() else 0


async def _spoken(writer: asyncio.StreamWriter, request: Hostile) -> None:
    size = max(1, len(request.data) // 20) if request.way == "pieces" else len(request.data) or 1
    for at in range(0, len(request.data), size):
        writer.write(request.data[at : at + size])
        await writer.drain()
        if request.way == "pieces":
            await asyncio.sleep(0.01)
    if request.way == "half-closed":
        writer.write_eof()


async def _heard(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Hostile, heard: bytearray
) -> None:
    if request.way in ("leaves", "resets"):
        with suppress(TimeoutError):
            heard += await asyncio.wait_for(reader.read(300), 0.3)
        if request.way == "resets":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return
    while part := await reader.read(64 if request.way == "slow" else 2**16):
        heard += part
        if request.way == "slow":
            await asyncio.sleep(0.05)
            if len(heard) > 64 * 40:
                return
