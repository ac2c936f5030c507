"""Prompts of people who code: to edit, explain, test and translate a function, and to write SQL, shell and
small programs. Same seed, same file. Those of the standard library are for `slipstream regenerate`; questions
for `slipstream bench` are of an installed package, which no head learnt.

    python benchmarks/coding_prompts.py --out prompts.jsonl --kind edits --limit 1600
    python benchmarks/coding_prompts.py --out editing.jsonl --kind edits --limit 12 --of networkx --questions
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

EDITS = [
    "Add type hints to this code. Return the whole code.",
    "Add docstrings to every function and class of this code. Return the whole code.",
    "Rename the local variables of this code so that they say what they hold. Return the whole code.",
    "Add error handling for bad arguments to this code. Return the whole code.",
    "Use f-strings and comprehensions in this code where they help. Return the whole code.",
    "Simplify this code without changing what it does. Return the whole code.",
    "Add a short comment above each step of this code. Return the whole code.",
    "Add logging to this code. Return the whole code.",
]
CODE = [
    "Explain what this code does, step by step.",
    "What could go wrong in this code? Name the edge cases.",
    "Write unit tests with pytest for this code.",
    "Translate this code into JavaScript.",
    "Translate this code into Go.",
    "Write a docstring for this code, with an example.",
    "Review this code as a senior engineer would.",
]
SQL = {
    "orders(id, customer_id, total, created_at, status)": ["total", "status", "customer_id", "created_at"],
    "employees(id, name, department_id, salary, hired_on)": ["salary", "department_id", "hired_on"],
    "flights(id, origin, destination, departs_at, seats, price)": ["origin", "price", "seats", "departs_at"],
    "tracks(id, album_id, title, seconds, plays)": ["seconds", "plays", "album_id"],
    "patients(id, name, born_on, ward, admitted_on)": ["ward", "admitted_on", "born_on"],
    "readings(sensor_id, at, temperature, humidity)": ["temperature", "humidity", "at"],
}
QUERIES = [
    "the ten rows with the highest {a}, with ties broken by {b}",
    "for each {a}, the number of rows and the average of {b}",
    "each {a} that occurs more than five times, with the latest {b}",
    "the running total by {b} within each {a}",
    "rows whose {a} is above the average of their {b}",
    "duplicates by {a} and {b}, and how to delete all but one",
]
SHELL = [
    "find all {x} files changed within the last {n} days and print their sizes, largest first",
    "count the lines of all {x} files below a directory, leaving out hidden directories",
    "rename all {x} files of a directory so that each name starts with its date",
    "compress {x} files older than {n} days and delete the originals once that has worked",
    "print the {n} most frequent words of all {x} files",
    "watch a directory and run a command whenever one of its {x} files changes",
    "split each {x} file into pieces of {n} thousand lines",
]
ENDINGS = ["log", "csv", "json", "py", "txt", "md", "yaml", "jpg", "html", "sql"]
PROGRAMS = [
    "a command-line tool that {x}",
    "a class that {x}, with tests",
    "a function that {x}, without any library",
    "an asynchronous service that {x}",
]
TASKS = [
    "keeps the last {n} values of a stream and gives their median",
    "parses dates in {n} formats and says which one matched",
    "merges {n} sorted files into one",
    "limits callers to {n} requests a minute",
    "caches results on disk for {n} minutes",
    "reads a CSV file of {n} columns and prints the statistics of each",
    "retries a download up to {n} times with growing pauses",
    "finds the shortest path in a grid of {n} by {n} cells",
    "validates e-mail addresses and reports the first {n} that are wrong",
    "formats a table of {n} columns for a terminal",
    "generates passwords of {n} characters by given rules",
    "computes the first {n} primes with a sieve",
    "simulates {n} elevators of a building",
    "evaluates arithmetic expressions nested up to {n} deep",
    "keeps a leaderboard of {n} players",
]


def functions(rng: random.Random, home: Path, least: int, most: int) -> Iterator[str]:
    """Functions and classes with so many characters of the library in a directory."""
    files = [
        path
        for path in sorted(home.rglob("*.py"))
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.relative_to(home).parts)
    ]
    rng.shuffle(files)
    for path in files:
        try:
            source = path.read_text()
            nodes = [
                node
                for node in ast.walk(ast.parse(source))
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            ]
        except (SyntaxError, UnicodeDecodeError, RecursionError):
            continue
        rng.shuffle(nodes)
        texts = (textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "") for node in nodes)
        yield from islice((text for text in texts if least <= len(text) <= most), 4)


def about_code(asks: list[str], rng: random.Random, home: Path, least: int, most: int) -> Iterator[str]:
    for text in functions(rng, home, least, most):
        yield f"{rng.choice(asks)}\n\n```python\n{text}\n```"


def short(rng: random.Random, home: Path) -> Iterator[str]:
    """SQL, shell and small programs."""
    while True:
        table, columns = rng.choice(list(SQL.items()))
        a, b = rng.sample(columns, 2)
        dialect = rng.choice(["PostgreSQL", "SQLite", "MySQL"])
        yield f"Given the table {table}, write a {dialect} query for {rng.choice(QUERIES).format(a=a, b=b)}."
        ask = rng.choice(SHELL).format(x="." + rng.choice(ENDINGS), n=rng.randint(2, 90))
        yield f"How do I {ask}, in {rng.choice(['bash', 'zsh', 'PowerShell', 'Python'])}?"
        task = rng.choice(PROGRAMS).format(x=rng.choice(TASKS).format(n=rng.randint(3, 60)))
        language = rng.choice(["Python", "Python", "Python", "TypeScript", "Rust", "Java", "C"])
        yield f"Write {task}, in {language}."


KINDS = {
    "edits": lambda rng, home: about_code(EDITS, rng, home, 400, 6000),
    "code": lambda rng, home: about_code(CODE, rng, home, 200, 3000),
    "short": short,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", help="an installed package; default: the standard library")
    parser.add_argument("--questions", action="store_true", help="rows for slipstream bench")
    args = parser.parse_args()
    paths = sysconfig.get_paths()
    home = Path(paths["purelib"]) / args.of if args.of else Path(paths["stdlib"])
    texts = islice(KINDS[args.kind](random.Random(args.seed), home), 4 * args.limit)
    prompts = list(islice(dict.fromkeys(texts), args.limit))
    if args.questions:
        named = enumerate(prompts)
        rows = [{"question_id": i, "category": args.kind, "turns": [prompt]} for i, prompt in named]
    else:
        rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(prompts)} prompts in {args.out}")


if __name__ == "__main__":
    main()
