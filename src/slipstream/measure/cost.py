"""What a target pass and the parts of a round cost on this machine, and how many distinct experts a pass of a
mixture reads, which is what wide passes cost it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

from slipstream.core.drafter import Drafter
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.target import Target
from slipstream.core.tree import chain
from slipstream.core.tree_spec import TreeSpec
from slipstream.engine.cuda_graphs import recorder
from slipstream.engine.engine import Engine, Seconds
from slipstream.engine.generate import LAWS
from slipstream.engine.request import Request
from slipstream.files import cache_home, update_json
from slipstream.measure.datasets import load_questions
from slipstream.measure.results import PARTS
from slipstream.plotting import picture
from slipstream.results import Figures, Part, Report, flat, heading
from slipstream.targets import HFTarget

ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 26, 32, 48, 64)
EXPERTS_CONTEXT = 32  # tokens before the rows whose experts are counted


class PassCost(Part):
    """A target pass over `rows` rows of each of `batch` texts, behind `context` tokens."""

    rows: int
    context: int
    batch: int
    ms: float
    gb_s: float  # the weights' bytes over the time
    share: float  # of the memory's bandwidth


class CostReport(Report):
    """What passes of a target cost on this machine."""

    bandwidth_gb_s: float  # of the memory
    weights_gb: float  # what a pass must read; of a mixture of experts, if it reads all of them
    passes: list[PassCost]
    experts: dict[int, float] = {}  # a mixture's distinct ones a layer that a pass reads, by rows

    @property
    def limit_ms(self) -> float:
        """The time that reading the weights takes."""
        return 1e3 * self.weights_gb / self.bandwidth_gb_s

    @property
    def _settings(self) -> Iterable[tuple[int, int]]:
        """Contexts and batches."""
        return dict.fromkeys((cost.context, cost.batch) for cost in self.passes)

    def __rich__(self) -> Group:
        """A column per context and batch, and the speed at which the one-row pass reads the weights."""
        title = f"{self.model}: ms of a pass, by its rows; columns: tokens of context × texts"
        table = Figures(title, "rows", *(f"{context} × {batch}" for context, batch in self._settings))
        ms = {(cost.rows, cost.context, cost.batch): cost.ms for cost in self.passes}
        for rows in dict.fromkeys(cost.rows for cost in self.passes):
            table.add_row(rows, *(f"{ms[rows, *setting]:.1f}" for setting in self._settings))
        one = self.passes[0]
        reads = f"one row reads weights at {one.gb_s:.1f} GB/s, {one.share:.0%} of {self.bandwidth_gb_s:.1f}"
        lines = [Text(f"{reads}: at least {self.limit_ms:.1f} ms")]
        if self.experts:
            counts = ", ".join(f"{count:.1f} by {rows}" for rows, count in self.experts.items())
            lines.append(Text(f"experts of a layer that a pass reads: {counts} rows"))
        return Group(table, *lines)

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(cost) for cost in self.passes]

    def plot(self, path: str | None = None) -> Any:
        """The time of a pass against its rows, for every context and batch, as `BenchReport.plot` draws."""
        with picture(path, 1) as (ax,):
            for context, batch in self._settings:
                some = [cost for cost in self.passes if (cost.context, cost.batch) == (context, batch)]
                rows, ms = [cost.rows for cost in some], [cost.ms for cost in some]
                label = f"{context} tokens, {batch} text{'s' if batch > 1 else ''}"
                ax.plot(rows, ms, marker="o", markersize=3, label=label)
            ax.axhline(self.limit_ms, color="gray", linestyle="--", linewidth=1, label="reading the weights")
            ax.set(xlabel="rows of a pass", ylabel="milliseconds", ylim=(0, None))
            ax.legend(frameon=False, fontsize="small")
        return ax.figure


def read_bandwidth(device: torch.device, mib: int = 512, repeats: int = 5) -> float:
    """GB/s at which the whole device reads memory that no cache holds."""
    x = torch.ones(mib * 2**20 // 4, device=device)
    return x.nbytes / min(timeit(lambda: x.sum().item(), number=1) for _ in range(repeats)) / 1e9


def _behind(target: Target, tokens: Tensor, rows: int) -> KVCache:
    """A cache that holds `tokens` and has room for a pass over so many rows."""
    batch, context = tokens.shape
    cache = target.new_cache(batch)
    cache.storage.hold(context + rows)
    target(chain(tokens), cache, rows=tokens[:, :0])
    cache.keep(None, torch.full((batch,), context, device=target.device))
    return cache


def pass_seconds(
    target: Target, rows: Sequence[int] = ROWS, context: int = 256, batch: int = 1, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of a target pass by its rows, behind `context` tokens. Sizes alternate, after an untimed
    pass of each. Where rounds are captured, replays are timed."""
    context = min(context, target.window - max(rows))
    tokens = torch.arange(batch * (context + max(rows)), device=target.device).view(batch, -1) % target.vocab
    cache = _behind(target, tokens[:, :context], max(rows))
    passes: dict[int, Callable[[], Any]] = {n: partial(target, chain(tokens[:, :n]), cache) for n in rows}
    if record := recorder(target):
        passes = {n: record(one)[1] for n, one in passes.items()}

    def one_pass(n: int) -> None:
        passes[n]()
        cache.lengths[0].item()  # on an accelerator: wait for it

    laps = [[timeit(partial(one_pass, n), number=1) for n in passes] for _ in range(repeats + 1)]
    return {n: median(times) for n, *times in zip(passes, *laps[1:], strict=True)}


class Rounds:
    """Rounds of several drafters behind the same prompts, timed in alternation. `arms`: drafters, and the
    trees that they grow (None: their own); `prompts`: of the texts that share a round; `most`: rounds that
    one drafter has room for."""

    def __init__(
        self,
        target: Target,
        arms: Sequence[tuple[Drafter, TreeSpec | None]],
        prompts: Sequence[Sequence[int]],
        temperature: float = 0.0,
        most: int = 32,
    ) -> None:
        self._target, self._arms, self._prompts, self._most = target, arms, prompts, most
        self._sampling = rows_of(Sampling(temperature), len(self._prompts))
        self._costs = [list[Seconds]() for _ in arms]
        self._engines = [self._engine(*arm) for arm in arms]

    def _engine(self, drafter: Drafter, spec: TreeSpec | None) -> Engine:
        depth, rows = (spec or drafter).depth, len(self._prompts)
        capacity = max(map(len, self._prompts)) + (self._most + 1) * (1 + depth)
        engine = Engine(self._target, drafter, LAWS[drafter.law], rows, capacity, [spec] if spec else [])
        engine.admit(*map(Request, map(list, self._prompts), self._sampling))
        engine.step(spec=spec)  # it makes buffers, and is not timed
        return engine

    def run(self, rounds: int, among: Sequence[int] | None = None) -> list[Seconds]:
        """Time rounds of every arm, or of those in `among`. Returns each arm's median seconds, by part, over
        all its rounds until now."""
        for _ in range(rounds):
            for i in range(len(self._engines)) if among is None else among:
                engine, (drafter, spec) = self._engines[i], self._arms[i]
                deepest = drafter.depth + (spec.depth if spec else 0)
                if max(engine.lengths) + deepest + 2 > engine.target.window:
                    engine = self._engines[i] = self._engine(drafter, spec)
                before = replace(engine.seconds)
                engine.step(spec=spec)
                self._costs[i].append(engine.seconds - before)
        return [
            Seconds(**{part: median(getattr(cost, part) for cost in costs) for part in PARTS})
            for costs in self._costs
        ]


def promised(alpha: float, gamma: int, c: float) -> float:
    """The speed-up of γ tokens drafted in a row, each accepted with chance α, where a draft step costs c of a
    target pass and rows cost nothing: (1 − α^{γ+1}) / ((1 − α)(γc + 1)) (Leviathan et al. 2023, Theorem
    3.8)."""
    return sum(alpha**i for i in range(gamma + 1)) / (gamma * c + 1)


def cost_curve(
    target: Target,
    contexts: Sequence[int] = (128, 512, 1024),
    batches: Sequence[int] = (1, 4),
    progress: Callable[[str], None] = lambda _: None,
) -> CostReport:
    """Costs of a target pass over 1 to 64 rows, the time that reading the weights takes, and how many experts
    are read. Contexts are cut to what the target reads. Raises ValueError for a target that reads less than
    65 tokens."""
    if (most := target.window - max(ROWS)) < 1:
        raise ValueError(f"passes of {max(ROWS)} rows are timed; this target reads {target.window} tokens")
    progress("reading memory")
    bandwidth, weights = read_bandwidth(target.device), target.read_bytes / 1e9
    passes = []
    for context, batch in product(dict.fromkeys(min(context, most) for context in contexts), batches):
        progress(f"passes behind {context} tokens of {batch} texts")
        for rows, seconds in pass_seconds(target, context=context, batch=batch).items():
            speed, ms = weights / seconds, round(seconds * 1e3, 3)
            rates = {"gb_s": round(speed, 2), "share": round(speed / bandwidth, 3)}
            passes.append(PassCost(rows=rows, context=context, batch=batch, ms=ms, **rates))
    sizes: dict[str, Any] = {"bandwidth_gb_s": round(bandwidth, 1), "weights_gb": round(weights, 3)}
    if isinstance(target, HFTarget) and target.text is not None:
        texts = [target.text.ids(question.turns[0]) for question in load_questions()]
        if experts := experts_read(target, texts, ROWS):
            sizes["experts"] = experts
    return CostReport(**heading(target), **sizes, passes=passes)


def costs_file() -> Path:
    """The file of `save_costs` in the user's cache: reports by place and target."""
    return cache_home() / "costs.json"


def save_costs(target: Target, report: CostReport) -> None:
    """Store a report. Raises ValueError where the file cannot be written."""
    update_json(costs_file(), {target.place: {target.name: report.stored()}})


@torch.inference_mode()
def experts_read(target: HFTarget, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> dict[int, float]:
    """Distinct experts of a layer that a pass reads, by its rows: the mean over layers and texts (tokens),
    without those too short for it. The rows follow each other in a text, as those of a draft nearly do.
    Nothing for a target without experts, and for a compiled one, whose layers are not looked into."""
    layers = [] if target.compiles else mixtures(target)
    chosen: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:  # the router's choice: the only whole numbers
        chosen.extend(x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point())

    counts: dict[int, list[int]] = {}
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        for n in rows if layers else ():
            for text in texts:
                if (context := min(EXPERTS_CONTEXT, len(text) - n)) > 0:
                    tokens = torch.tensor([list(text[: context + n])], device=target.device)
                    cache = _behind(target, tokens[:, :context], n)
                    chosen.clear()
                    target(chain(tokens[:, context:]), cache)
                    counts.setdefault(n, []).extend(len(experts.unique()) for experts in chosen)
    finally:
        for hook in hooks:
            hook.remove()
    return {n: round(sum(some) / len(some), 3) for n, some in counts.items() if some}


def mixtures(target: HFTarget) -> list[nn.Module]:
    """The modules of a target that hold weights of several experts, stacked."""
    modules = target.shadow_model.modules()
    return [module for module in modules if any(w.dim() == 3 for w in module.parameters(recurse=False))]
