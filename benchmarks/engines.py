"""Engines that answer beside ours: processes of peer_worker.py, in environments that are made for them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

import slipstream
from slipstream.catalog import find_target
from slipstream.files import cache_home
from slipstream.targets import HFTarget
from slipstream.targets.quantized import KINDS

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("peer_worker.py")
OURS = "Slipstream"
RECIPES = {  # what pip installs into an environment, call by call
    "llama.cpp": [["--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"]],
    "openvino": [  # torchvision, which optimum-intel asks for, is there for another build of torch
        ["{torch}", "transformers==5.5.4", "huggingface-hub==1.21.0", "requests==2.34.2"],
        ["optimum==2.3.0", "nncf==3.4.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"],
        ["--no-deps", "optimum-intel==2.2.0"],
    ],
}
# For this processor. GCC 12 drops stores that AMX's tile configuration reads, and llama.cpp then crashes.
BUILT = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CXXFLAGS": "-fno-dse -fno-tree-dse"}
SKIPPED = range(10, 15)  # blocks of the target that the assistant of Hugging Face does without
HEADS = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "fasteagle": "FastEagle"}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Engine:
    """A process to start: a class of peer_worker.py with its options, and arms with options of answers.

    Attributes:
        environment: one of `ENVIRONMENTS`; None is that of this process.
    """

    name: str
    kind: str
    options: dict[str, Any]
    arms: dict[str, dict[str, Any]] = field(default_factory=lambda: {"plain": {}})
    environment: str | None = None

    def named(self) -> dict[str, dict[str, Any]]:
        return {f"{self.name}, {arm}": options for arm, options in self.arms.items()}


class Answers(Protocol):
    """What answers requests."""

    versions: dict[str, str]

    def ask(self, **request: Any) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Way(NamedTuple):
    """What answers for an arm, and the options of its answers."""

    answers: Answers
    options: dict[str, Any]


class Worker:
    """A process that answers a JSON object a line by one. It is stopped while it is not asked, because
    threads of OpenMP and of others spin while they wait.

    Raises:
        ValueError: the process ended; the message is the last line that it wrote to standard error.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **env},
            process_group=0,
        )
        self.versions: dict[str, str] = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:
            pass
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            said = self.log.read()
            self.close()
            raise ValueError(last_line(said))
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def last_line(text: str) -> str:
    """The last line that speaks of an error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it ended without a word"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])


def environment(name: str) -> str:
    """The Python of an environment, which is made unless it is there. Raises ValueError."""
    home = cache_home() / "peers" / name
    ready, commands = home / ".ready", steps(name, home)
    recipe = json.dumps(commands)
    if name in RECIPES:
        if ready.exists() and ready.read_text() == recipe:
            return str(home / "bin" / "python")
        shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **BUILT})
        except OSError as error:
            raise ValueError(f"{command[0]} cannot be run: {error.strerror}") from error
        if made.returncode:
            raise ValueError(f"its environment cannot be made: {last_line(made.stdout + made.stderr)}")
    if name in RECIPES:
        ready.write_text(recipe)
    return str(home / "bin" / "python")


def steps(name: str, home: Path) -> list[list[str]]:
    """The commands that make an environment. `make` looks itself whether vLLM's is there."""
    if name == "vllm":
        return [["make", "-C", str(ROOT), "vllm", f"VLLM={home}", f"PYTHON={sys.executable}"]]
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    torch = next(line for line in pinned if line.startswith("torch=="))
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    calls = [[word.format(torch=torch) for word in words] for words in RECIPES[name]]
    return [[sys.executable, "-m", "venv", str(home)], *([*pip, *words] for words in calls)]


def engines(
    target: HFTarget, home: Path, drafters: Sequence[str], threads: int, compiles: bool = True
) -> list[Engine]:
    """All of them. What they read is written into `home`, or is the target's GGUF file. Raises ValueError."""
    home.mkdir(parents=True, exist_ok=True)
    model, assistant = (str(home / name) for name in ("target", "assistant"))
    target.save(model)
    save_assistant(target, assistant)
    how = {"dtype": target.dtype_name, "threads": threads}
    hf = {"model": model, **how}
    ours = {"model": target.name, **how, "compile": compiles}
    arms = {drafter: {"drafter": drafter} for drafter in drafters}
    generate: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assisted": True},
    }
    made = [
        Engine(OURS, "Slipstream", ours, arms),
        *(Engine(f"{OURS} {kind}", "Slipstream", {**ours, "quantize": kind}, arms) for kind in KINDS),
        Engine("Hugging Face", "Transformers", {**hf, "assistant": assistant}, generate),
        Engine("OpenVINO int8", "OpenVINO", hf, environment="openvino"),
        Engine(
            "llama.cpp Q4_1",
            "LlamaCpp",
            {"model": gguf(target.name), "threads": threads},
            environment="llama.cpp",
        ),
        Engine("vLLM", "VLLM", hf, environment="vllm"),
        Engine("vLLM", "VLLM", {**hf, "speculative_config": LOOKUP}, {"n-gram": {}}, "vllm"),
    ]
    with suppress(ValueError):  # no head ships for the target
        made.append(vllm_head(target, home, hf, "eagle", 3, "EAGLE"))
    return made


def crowded(
    target: HFTarget,
    home: Path,
    drafters: Sequence[str],
    threads: int,
    texts: int,
    chains: Sequence[int] = (),
    compiles: bool = True,
) -> list[Engine]:
    """Those that answer many prompts at once, `texts` at most; vLLM also with each head that ships, which
    drafts chains of so many tokens. What they read is written into `home`. Raises ValueError."""
    home.mkdir(parents=True, exist_ok=True)
    target.save(home / "target")
    how = {"dtype": target.dtype_name, "threads": threads}
    hf, arms = {"model": str(home / "target"), **how}, {each: {"drafter": each} for each in drafters}
    made = [
        Engine(OURS, "Slipstream", {"model": target.name, **how, "compile": compiles}, arms),
        Engine("Hugging Face", "Transformers", hf),
        Engine("vLLM", "VLLM", {**hf, "texts": texts}, environment="vllm"),
    ]
    for length, (method, name) in product(chains, HEADS.items()):
        with suppress(ValueError):  # no head ships for the target
            options = {**hf, "texts": texts}
            made.append(vllm_head(target, home, options, method, length, f"{name} of {length}"))
    return made


def vllm_head(
    target: HFTarget, home: Path, options: dict[str, Any], method: str, length: int, arm: str
) -> Engine:
    """vLLM with a head that ships. Raises ValueError where none does."""
    slipstream.export(target, method, home / method)
    known_as = "eagle" if method == "eagle" else "eagle3"
    drafting = {"method": known_as, "model": str(home / method), "num_speculative_tokens": length}
    return Engine("vLLM", "VLLM", {**options, "speculative_config": drafting}, {arm: {}}, "vllm")


def gguf(name: str) -> str | None:
    """The file that a target's name leads to."""
    found = find_target(name)[1]
    return None if found is None else str(found)


def save_assistant(target: HFTarget, directory: str) -> None:
    """Write the target without some of its blocks, where there is no smaller model of its family."""
    model: Any = deepcopy(target.model)
    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList(each for i, each in enumerate(decoder.layers) if i not in SKIPPED)
    model.config.num_hidden_layers = len(decoder.layers)
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [each for i, each in enumerate(kinds) if i not in SKIPPED]
    model.save_pretrained(directory)


def started(engine: Engine) -> Worker:
    """The engine's process. Raises ValueError where it cannot be had."""
    if engine.environment == "llama.cpp" and engine.options["model"] is None:
        raise ValueError("it reads GGUF files: give one as the target")
    python = environment(engine.environment) if engine.environment else sys.executable
    env = {"OMP_NUM_THREADS": str(engine.options["threads"]), "PYTHONPATH": str(ROOT / "src")}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Worker([python, str(WORKER), engine.kind, json.dumps(engine.options)], env)


def begun(
    engines: Sequence[Engine],
    last: ExitStack,
    progress: Callable[[str], None],
    start: Callable[[Engine], Answers] = started,
) -> tuple[dict[str, Way], dict[str, str]]:
    """The arms of all engines that can be had, which end with `last`, and why others cannot."""
    arms, skipped = dict[str, Way](), dict[str, str]()
    for engine in engines:
        progress(f"starting {', '.join(engine.named())}")
        try:
            answers = start(engine)
        except ValueError as error:
            skipped |= dict.fromkeys(engine.named(), str(error))
            continue
        last.callback(answers.close)
        arms |= {name: Way(answers, options) for name, options in engine.named().items()}
    return arms, skipped
