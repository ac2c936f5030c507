"""Commands that write, killed at random moments and run again: do they leave what an undisturbed run leaves?

    python benchmarks/kills.py --kills 200 --json benchmarks/results/kills.json

They answer and learn with a Llama of two layers that is made on the spot. Each command runs once undisturbed.
Then it is begun in an empty directory, killed (SIGKILL) and run again until it ends, over and over. The
moments are drawn with a fixed seed, as shares of the undisturbed run's time. All files that it leaves are
compared, but for the fields in `CLOCK` and `CHOSEN`. Exit code 1 if one differs. Processes are forks of one
that has imported everything.
"""

import importlib
import json as json_module
import multiprocessing
import os
import random
import shutil
import signal
import string
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from common import run
from slipstream import cli as commands
from slipstream.cli import common as cli
from slipstream.files import cache_home, check_writable
from slipstream.kernels import ops as kernels
from slipstream.machine import hardware, versions
from slipstream.results import Figures, Part, Result, made

# Fields that the clock decides, or that say how a run was called.
CLOCK = (
    *("command", "minutes", "seconds", "tokens_per_second", "speedup", "intervals", "of_files"),
    *("host_share", "memory_mib", "estimate_seconds", "expected", "ledger"),
)
# Of tune: trees that were chosen and timed by what rounds cost in that run.
CHOSEN = ("passes_ms", "draft_step_ms", "plain", "budgets", "gammas", "candidates", "chosen", "rungs")
STATE = "state.pt"  # a checkpoint holds the time that training took
MOST = 8  # kills of one run
LONGER = 1.15  # a moment may lie so far behind the undisturbed run's time
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}{% if m.role[0] == 'a' %}</s>{% endif %}"
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}a {% endif %}"
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
IMPORTED = [
    *("accelerate", "matplotlib.pyplot", "transformers.models.llama.modeling_llama"),
    "slipstream.kernels.ops",
    "slipstream.measure.certify",
    "slipstream.measure.results",
    "slipstream.measure.papers.reproduce",
    "slipstream.measure.bench",
    "slipstream.measure.tune",
    "slipstream.training.inventory",
    "slipstream.training.run",
    "slipstream.training.synthesize",
    "slipstream.interop.public",
]
Words = list[str]


@dataclass(frozen=True)
class Case:
    """A command that writes `out`, and what it is given to go on, once `out` is there."""

    name: str
    begin: Words
    resume: Words
    out: str

    def words(self, home: Path) -> Words:
        """The command line of the next run. A training run goes on from its checkpoint, or begins anew."""
        if self.name == "train" and (home / self.out).exists():
            return [*self.begin, "--resume" if (home / self.out / STATE).exists() else "--force"]
        return self.begin + (self.resume if (home / self.out).exists() else [])


class Killed(Part):
    """How often a command was killed, how many runs ended behind one kill or more, and how many of these left
    other files than an undisturbed one, or half-written ones beside them."""

    command: str
    kills: int
    ended: int
    seconds: float  # of the undisturbed run
    different: list[str]
    left_over: int


class Kills(Result):
    """All commands."""

    hardware: dict[str, Any]
    versions: dict[str, str]
    seed: int
    ignored: list[str]
    kills: int
    rows: list[Killed]

    def __rich__(self) -> Figures:
        title = f"{self.kills} kills; without {', '.join(self.ignored)}"
        table = Figures(title, "command", "kills", "runs that ended", "different", "left over")
        for row in self.rows:
            table.add_row(row.command, row.kills, row.ended, len(row.different), row.left_over)
        return table


def write_inputs(home: Path) -> None:
    """A model that says letters, questions, and conversations."""
    vocab = {word: i for i, word in enumerate([*string.ascii_letters, " ", ".", ",", "</s>"])}
    words = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=vocab["</s>"],
        initializer_range=0.3,
    )  # fmt: skip
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(home / "model")
    drawn = random.Random(0)
    said = ["".join(drawn.choices(string.ascii_lowercase, k=12)) for _ in range(80)]
    asked = [{"turns": [text, text[::-1]]} for text in said[:4]]
    talks = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]}
        for text in said
    ]
    for name, rows in (("questions", asked), ("data", talks)):
        (home / f"{name}.jsonl").write_text("".join(json_module.dumps(row) + "\n" for row in rows))


def cases(home: Path) -> list[Case]:
    """The commands, in an order in which later ones find what earlier ones made."""
    model, questions, data = (str(home / name) for name in ("model", "questions.jsonl", "data.jsonl"))
    target, head = ["--target", model, "--dtype", "float32"], "../head"
    asked = ["--questions", questions, "--max-new-tokens", "8", *target]
    write = ["--max-new-tokens", "12", "--batch", "4", "--temperature", "0", "--temperature", "1", *target]
    small = ["head.draft_vocab=40", "head.tree=chain-3", "data.max_length=40", "data.held_out_tokens=8"]
    small += ["schedule.batch_tokens=64", "schedule.evaluate_every=4", "schedule.save_every=3"]
    small += ["schedule.epochs=2"]
    own = ["--drafter", f"{head}:tree=chain-2"]
    greedy = [*own, "--drafter", "ngram", "--drafter", "suffix:remember=1"]
    drawn = [*own, "--drafter", "lookahead", "--temperature", "1", "--batch", "2"]
    certified = [*own, "--drafter", f"{head}:tree=chain-2,proposal=sampled", "--draws", "16"]
    sets = [word for name in SETS for word in ("--set", f"{name}={questions}")]
    table = ["eagle-table-1", "--no-speed", "--head", f"eagle={head}", "--limit", "2"]
    again, force = ["--resume"], ["--force"]
    return [
        Case("train", ["train", "eagle", "--data", data, "--out", "head", *target, *small], [], "head"),
        Case("synthesize", ["synthesize", "--prompts", "8", "--out", "own.jsonl", *write], [], "own.jsonl"),
        Case("regenerate", ["regenerate", data, "--out", "out.jsonl", *write], [], "out.jsonl"),
        Case("data", ["data", data, "--out", "clean.jsonl", *target[:2]], [], "clean.jsonl"),
        Case("bench", ["bench", *greedy, *asked, "--json", "a.json"], again, "a.json"),
        Case("bench, drawn", ["bench", *drawn, *asked, "--json", "b.json"], again, "b.json"),
        Case("certify", ["certify", *certified, *asked, "--json", "c.json"], again, "c.json"),
        Case("reproduce", ["reproduce", *table, *sets, *asked[2:], "--json", "t.json"], again, "t.json"),
        Case(
            "tune",
            ["tune", "--drafter", head, *asked[:2], *target, "--limit", "2", "--json", "u.json"],
            [],
            "u.json",
        ),
        Case("export", ["export", head, *target, "--out", "public"], force, "public"),
        Case("import", ["import", "../public", *target, "--out", "back"], force, "back"),
    ]


def forked(words: Words, home: Path, log: Path, limit: float | None = None) -> tuple[int | None, float]:
    """Run a command line in a process of its own, which is killed after `limit` seconds. Its exit code (None:
    it was killed) and its time."""
    began, child = time.monotonic(), os.fork()
    with suppress(OSError):  # whichever of both is first: a kill reaches what the process has begun, too
        os.setpgid(child, child)
    if not child:
        os.chdir(home)
        torch.set_num_threads(1)  # threads that find a fork's pool broken mend it, and fail if two are at it
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["XDG_CACHE_HOME"] = str(home / ".cache")
        sys.argv = ["slipstream", *words]
        code = 70
        try:
            commands.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            os._exit(code)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        spent = time.monotonic() - began
        if ended:
            return os.waitstatus_to_exitcode(status), spent
        if limit is not None and spent >= limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, spent
        time.sleep(0.002)


def fresh(home: Path) -> Path:
    """An empty directory, whose cache has this machine's kernels."""
    shutil.rmtree(home, ignore_errors=True)
    (home / ".cache" / "slipstream").mkdir(parents=True)
    if (built := cache_home() / "kernels").exists():
        (home / ".cache" / "slipstream" / "kernels").symlink_to(built.resolve())
    return home


def left(home: Path, out: str) -> dict[str, Any]:
    """What a command has left, by file: JSON without the ignored fields, other files as they are."""
    place = home / out
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    return {str(file.relative_to(home)): _content(file) for file in files if _counts(file)}


def _counts(file: Path) -> bool:
    return file.is_file() and file.name != STATE and not file.name.startswith(".")


def _content(file: Path) -> Any:
    return without(json_module.loads(file.read_text())) if file.suffix == ".json" else file.read_bytes()


def without(value: Any) -> Any:
    """JSON without the ignored fields."""
    if isinstance(value, dict):
        return {key: without(each) for key, each in value.items() if key not in (*CLOCK, *CHOSEN)}
    return [*map(without, value)] if isinstance(value, list) else value


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Where they differ: files, and for JSON the path to the first field."""
    return [
        f"{name}{_where(ours.get(name), theirs.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def _where(ours: Any, theirs: Any) -> str:
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [(key, ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [*zip(range(len(ours)), ours, theirs, strict=True)]
    return next((f".{key}{_where(a, b)}" for key, a, b in pairs if a != b), "")


def killed(case: Case, kills: int, home: Path, moments: random.Random) -> Killed:
    """Kill a command so often. Raises ValueError where it fails undisturbed."""
    log = home / f"{case.name}.log"
    code, took = forked(case.begin, fresh(home / "whole"), log)
    if code:
        raise ValueError(f"{case.name} ended with code {code}: see {log}")
    want, different = left(home / "whole", case.out), list[str]()
    done, ended, over = 0, 0, 0
    while done < kills:
        parts, count = fresh(home / "parts"), 0
        while True:
            last = count == MOST or done == kills
            limit = None if last else took * LONGER * moments.random()
            code, _ = forked(case.words(parts), parts, log, limit)
            if code is not None:
                break
            count, done = count + 1, done + 1
        if not count:
            continue
        ended += 1
        found = [f"code {code}"] if code else differences(want, left(parts, case.out))
        different += [f"behind kill {done}: {each}" for each in found]
        visible = {path.name for path in (home / "whole").iterdir()}
        over += sum(path.name not in visible for path in parts.iterdir())
    how: dict[str, Any] = {"command": case.name, "kills": done, "ended": ended, "seconds": round(took, 2)}
    return Killed(**how, different=different, left_over=over)


def kill(
    count: int,
    seed: int = 0,
    only: Sequence[str] = (),
    keep: Callable[[Kills], None] = lambda _: None,
) -> Kills:
    """Kill all commands, about equally often; `keep` gets the result so far. Raises ValueError."""
    torch.set_num_threads(1)  # a fork has no other threads
    for name in IMPORTED:
        importlib.import_module(name)
    kernels.load()
    home = Path(tempfile.mkdtemp(prefix="kills-"))
    rows = list[Killed]()
    writer = multiprocessing.get_context("fork").Process(target=write_inputs, args=[home])
    writer.start()  # what is forked from a process whose torch has worked may fail
    writer.join()
    chosen = cases(home)
    names = [case.name for case in chosen]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"Unknown command: {unknown[0]!r}. Commands: {'; '.join(names)}")
    ordered = [case for case in chosen if case.name in only or not only]
    for case in chosen:
        if case in ordered:
            place = ordered.index(case)
            share = count * (place + 1) // len(ordered) - count * place // len(ordered)
            rows.append(killed(case, share, home, random.Random(f"{seed} {case.name}")))
            about: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "seed": seed}
            about |= {"ignored": [*CLOCK, *CHOSEN], "kills": sum(row.kills for row in rows)}
            report = Kills(**made(), **about, rows=rows)
            keep(report)
        elif case.name in ("train", "export"):  # which later commands read
            forked(case.begin, fresh(home / "whole"), home / f"{case.name}.log")
        if case.name in ("train", "export"):
            shutil.copytree(home / "whole" / case.out, home / case.out)
    shutil.rmtree(home)
    return report


def main(
    kills: Annotated[int, cli.option("in all", "N", "--kills", min=1)] = 200,
    seed: Annotated[int, cli.option("of the moments", "N")] = 0,
    only: Annotated[list[str], cli.option("a command; repeat it", "NAME")] = [],  # noqa: B006
    json: Annotated[str | None, cli.option("the result", "FILE")] = None,
) -> None:
    """Kill, go on, compare, print."""
    check_writable(json)

    def keep(report: Kills) -> None:
        print(report.rows[-1], flush=True)
        if json is not None:
            report.write(json)

    report = kill(kills, seed, only, keep)
    cli.out.print(report)
    if any(row.different for row in report.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
