"""The training loop: steps, predictions of τ, and checkpoints that continue exactly."""

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import yaml
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from torch.nn.attention import sdpa_kernel

from slipstream.core.drafter import FINAL
from slipstream.core.target import Target
from slipstream.directories import RUN, RUN_MARK, claimed
from slipstream.drafters.objective import Batch, Objective, coverage
from slipstream.drafters.recipe import Data, Optimizer, Recipe
from slipstream.drafters.store import find_drafter, save_drafter
from slipstream.engine.replay import Prediction, decoded, predict, record
from slipstream.files import replacing, understood
from slipstream.machine import memory_kept
from slipstream.methods import METHODS
from slipstream.targets.recorded import RecordedTarget
from slipstream.training.batch_generation import BACKENDS
from slipstream.training.data import hold_out, load_examples
from slipstream.training.features import Features, pack
from slipstream.training.resume import read_checkpoint, write_checkpoint

STATE, LOG, RECIPE = "state.pt", "log.jsonl", RUN
OWN = 0.95  # the share of a greedy answer's tokens that are the target's likeliest, in any precision


@dataclass(frozen=True)
class Evaluation:
    """A prediction of τ along the held-out answers."""

    stage: int
    step: int
    trained: int  # tokens trained on before it
    loss: float | None  # of the last step; None before the first
    tau: float
    acceptance: list[float]  # for each depth, the share of rounds that accept at least as deep


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint."""

    stage: int = 0  # the next stage and step to take
    step: int = 0
    trained: int = 0  # tokens learnt from, over all stages
    seconds: float = 0.0  # spent on steps, over all stages
    best: float = 0.0  # the highest predicted τ; the drafter directory holds the weights that reached it
    history: list[Evaluation] = field(default_factory=list)

    @property
    def minutes(self) -> float:
        return round(self.seconds / 60, 1)


@dataclass(frozen=True)
class StepFigures:
    """The figures after a step."""

    stage: int
    step: int
    of: int  # steps of this stage
    loss: float
    agree: float  # the share of tokens whose likeliest guess is the target's
    tokens_per_second: float
    tau: float  # the latest prediction


Show = Callable[[StepFigures], None]
Filling = Callable[[str, int], Callable[[int], None]]  # long work's name and tokens → progress in tokens


class Trainer:
    """One run in one directory.

    The directory is locked from `prepare` to the end of `run`, or to an error.

    Args:
        directory: new, empty, or left by a run that saved nothing.
        resume: continue from the directory's last checkpoint, whose recipe must be the given one.
        force: begin a run in any directory, whatever it holds, and with answers of any target.

    Raises:
        ValueError: the data, the directory or the checkpoint does not fit, or another process writes there.
    """

    def __init__(
        self, target: Target, recipe: Recipe, directory: str, resume: bool = False, force: bool = False
    ) -> None:
        self.target, self.recipe, self.home, self.stages = target, recipe, Path(directory), recipe.staged()
        self._directory, self._resume, self._force = directory, resume, force
        self._method: type[Objective] = resolve_name(str(METHODS[recipe.method].objective))
        self._storage: torch.dtype = getattr(torch, recipe.head.storage)
        taps = recipe.head.reads(target.sizes.blocks)
        self._taps = taps if taps[-1:] == (FINAL,) else (*taps, FINAL)  # labels are last
        AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
        self.accelerator = Accelerator(
            mixed_precision=recipe.schedule.precision,
            cpu=target.device.type == "cpu",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))],  # while one reads features
        )
        self.progress = Progress()
        self.leads = self.accelerator.is_main_process  # only this process writes
        self.checkpoint: str | None = None  # where the last one was made
        self._stop, self._data_key = 0, ""  # the signal to stop for; the key of the stage's features
        self._lock, self._saved = ExitStack(), None
        self._judged: frozenset[tuple[int, ...]] = frozenset()  # the last stage's held-out questions
        self._made_by = {
            "target": target.fingerprint,
            "dtype": target.precision,
            "processes": self.accelerator.num_processes,
            "recipe": recipe.model_dump(mode="json"),
        }
        with self._claimed():
            if resume:
                self._saved = read_checkpoint(self.home / STATE, self._made_by, self.home / RECIPE)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Lock the directory. Raises ValueError if this run may not write there."""
        if not self.leads:
            yield
            return
        home, directory, continues = self.home, self._directory, self._resume or self._force
        start = getattr(self.recipe.head, "start", None)
        begun_as = [] if start is None else [find_drafter(start, self.target)]
        with claimed(directory, ("train",), continues, [self.target.source, *begun_as]):
            begun, drafts = (home / STATE).exists(), (home / "config.json").exists()
            if self._resume and not begun:
                begin = "begin anew with --force" if drafts else "leave --resume out to begin"
                raise ValueError(f"{directory} holds no checkpoint to resume: {begin}")
            if not continues and (begun or drafts):
                holds = "training run: go on with --resume" if begun else "drafter: begin anew with --force"
                raise ValueError(f"{directory} holds a {holds}, or name another directory")
            yield

    def prepare(self, filling: Filling = lambda what, total: lambda n: None) -> None:
        """Read the data, let the target answer the held-out prompts, and begin or restore the objective."""
        with ExitStack() as lock, sdpa_kernel(BACKENDS):
            lock.enter_context(self._claimed())  # released if this fails
            self._read_data(self.stages[-1].data)  # the last stage's data decide the drafter's vocabulary
            self._rehearse()
            self.recorded, self._filling = self._known_answers() or self._record(filling), filling
            taps = zip(self.recorded.tapped(self._taps), self.recorded.lengths, strict=True)
            features = torch.cat([states[:length] for states, length in taps])
            self.objective = self._method.begin(self.recipe, self.target, self._all, features)
            self.vocab_coverage = coverage(self._all, self.objective._vocab)
            if (saved := self._saved) is not None:
                self.objective.load_state_dict(saved["objective"])
                history = [Evaluation(**entry) for entry in saved["progress"]["history"]]
                self.progress = Progress(**{**saved["progress"], "history": history})
                self.checkpoint = self._place()
                self.vocab_coverage = saved["coverage"]
                if "vocab" in saved:
                    self.objective.take_vocab(saved["vocab"])
            self._lock = lock.pop_all()

    def _rehearse(self) -> None:
        """Make all that the recipe asks for once, before features take hours. Raises ValueError."""
        target, width = self.target, sum(self.target.widths(self._taps))
        sample = torch.ones(8, width, dtype=target.dtype, device=target.device)
        with understood("this recipe"):
            objective = self._method.begin(self.recipe, target, self._all[:8], sample)
            objective.drafter(self.recipe.head.tree, self._storage)
            for stage in self.stages:
                _adamw(objective, stage.optimizer)

    def _known_answers(self) -> RecordedTarget | None:
        """The held-out texts of the data, if they are marked as the target's greedy answers and are."""
        # The first token of an answer comes from the prompt's pass, so none of it is drafted.
        if not all(example.greedy and len(example.answer) > 1 for example in self._held_out):
            return None
        texts = [(e.prompt, e.answer[: self._data.held_out_tokens]) for e in self._held_out]
        recorded = RecordedTarget(self.target, texts, self._taps)
        return recorded if recorded.greedy_share() > OWN else None

    def _record(self, filling: Filling) -> RecordedTarget:
        """The target's own answers to the held-out prompts."""
        prompts, limit = [example.prompt for example in self._held_out], self._data.held_out_tokens
        advance = filling("answering held-out prompts", len(prompts) * limit)
        recorded = record(self.target, prompts, limit, self._taps)
        advance(len(prompts) * limit)
        return recorded

    def _read_data(self, data: Data) -> None:
        accepted = self._force or self._resume  # a run that goes on has looked at them
        names = ", ".join(data.files)
        examples = load_examples(data.files, self.target, data.max_length, data.limit, data.greedy, accepted)
        if (n := len(examples)) < 8:
            raise ValueError(f"{n} examples remain of {names}: training takes 8 at least")
        (others, self._held_out), self._data = hold_out(examples, data.held_out), data
        self._judged = self._judged or frozenset(example.question for example in self._held_out)
        self._all = [example for example in others if example.question not in self._judged]
        if not self._all:
            raise ValueError(f"all {n} examples of {names} ask what held-out ones ask: give others")

    def run(self, show: Show = lambda figures: None) -> Progress:
        """Train to the end. Ctrl-C and SIGTERM leave a checkpoint to resume from. Then their own handlers are
        called: that of Ctrl-C raises KeyboardInterrupt. Raises ValueError: a checkpoint cannot be written, or
        training diverges. The last checkpoint stays."""
        with self._lock, sdpa_kernel(BACKENDS), memory_kept():
            self._write_recipe()
            for stage in range(self.progress.stage, len(self.stages)):
                self._run_stage(self.stages[stage], show)
                self.progress.stage, self.progress.step = stage + 1, 0
                self._save(None)
            return self.progress

    def _run_stage(self, recipe: Recipe, show: Show) -> None:
        accelerator, progress, schedule = self.accelerator, self.progress, recipe.schedule
        features = self._features(recipe)
        optimizer = _adamw(self.objective, recipe.optimizer)
        model, optimizer = accelerator.prepare(self.objective, optimizer)
        if self._saved is not None and self._saved["optimizer"] is not None:
            optimizer.load_state_dict(self._saved["optimizer"])
        self._saved = None
        per_epoch = max(1, len(features.batches) // accelerator.num_processes)
        steps = max(1, round(schedule.epochs * per_epoch))
        if not progress.history:
            self._evaluate()
        with self._interruptible():
            while progress.step < steps:
                began = time.perf_counter()
                batch = self._batch(features, per_epoch, schedule.seed)
                loss, agree, counted, stop = self._step(model, optimizer, batch, recipe, steps)
                progress.step, progress.trained = progress.step + 1, progress.trained + counted
                progress.seconds += (took := time.perf_counter() - began)
                if progress.step % schedule.evaluate_every == 0 or progress.step == steps:
                    self._evaluate(loss)
                tau = progress.history[-1].tau
                show(StepFigures(progress.stage, progress.step, steps, loss, agree, counted / took, tau))
                if stop or (progress.step % schedule.save_every == 0 and progress.step < steps):
                    self._save(optimizer)
                if stop:
                    raise KeyboardInterrupt
            # The next stage may read features for hours.
            if accelerator.reduce(torch.tensor(float(self._stop), device=accelerator.device), "sum") > 0:
                self._save(optimizer)
                raise KeyboardInterrupt
        accelerator.free_memory()  # of the optimizer, which it holds

    def _features(self, recipe: Recipe) -> Features:
        """The features of the stage's data, cached as far as the recipe allows."""
        if recipe.data != self._data:
            self._read_data(recipe.data)
        batches, processes = pack(self._all, recipe.schedule.batch_tokens), self.accelerator.num_processes
        if len(batches) < processes:
            fix = "give more data, or lower schedule.batch_tokens"
            raise ValueError(f"{len(batches)} batches are too few for {processes} processes: {fix}")
        taps = self._taps if self._method.reads_features else ()
        features = Features(self.target, self._all, batches, taps, int(recipe.features.disk_gib * 2**30))
        self._data_key = features.key
        if self._saved is not None and self._saved["data"] not in (None, features.key):
            raise ValueError(f"the training data has changed since the checkpoint in {self.home}: begin anew")
        if self.leads and features.stored:
            features.fill(self._filling("reading features", features.tokens))
        self.accelerator.wait_for_everyone()
        return features

    def _step(
        self, model: torch.nn.Module, optimizer: Any, batch: Batch, recipe: Recipe, steps: int
    ) -> tuple[float, float, int, bool]:
        """One step of all processes: loss per token, share of agreeing tokens, tokens, whether to stop."""
        accelerator, progress = self.accelerator, self.progress
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe.optimizer, progress.step, steps)
        seed = _mix(recipe.schedule.seed, progress.stage, progress.step, accelerator.process_index)
        with warnings.catch_warnings():  # norms keep fp32 weights in mixed precision
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            generator = torch.Generator(accelerator.device).manual_seed(seed)
            loss, agreed = model(batch, recipe.loss, generator)
        sums = torch.stack([batch.counts.sum(), agreed, loss.detach(), loss.new_tensor(self._stop)])
        counted, agree, total, stop = accelerator.reduce(sums.double(), "sum").tolist()
        # Accelerate averages the processes' gradients, and the loss shall be a mean over all their tokens.
        accelerator.backward(loss * accelerator.num_processes / counted)
        norm = accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise self._diverged(f"the loss is {total / counted:.3g}, its gradient {float(norm):.3g}")
        optimizer.step()
        optimizer.zero_grad()
        return total / counted, agree / counted, int(counted), stop > 0

    def _check_weights(self) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.objective.parameters()):
            raise self._diverged("a weight is no finite number")

    def _diverged(self, what: str) -> ValueError:
        return ValueError(
            f"training diverged at step {self.progress.step} of stage {self.progress.stage + 1}: {what}: the "
            f"last checkpoint and the best drafter stay in {self.home}; begin anew with a lower optimizer.lr"
        )

    def _batch(self, features: Features, per_epoch: int, seed: int) -> Batch:
        """This process's next batch. Each epoch has an order of its own, known from its number alone."""
        processes, (epoch, index) = self.accelerator.num_processes, divmod(self.progress.step, per_epoch)
        shuffle = torch.Generator().manual_seed(_mix(seed, self.progress.stage, epoch, -1))
        order = torch.randperm(len(features.batches), generator=shuffle)
        b = int(order[index * processes + self.accelerator.process_index])
        examples = [self._all[i] for i in features.batches[b]]
        return Batch.collate(examples, features.of(b), self.accelerator.device)

    def _evaluate(self, loss: float | None = None) -> None:
        """Predict τ, and save the drafter directory if it is the best so far."""
        self._check_weights()
        progress, drafter = self.progress, self.objective.drafter(self.recipe.head.tree, self._storage)
        prediction = self.judge(drafter)
        tau, acceptance = round(prediction.tau, 4), [round(share, 4) for share in prediction.acceptance]
        place = (progress.stage, progress.step, progress.trained, loss)
        progress.history.append(Evaluation(*place, tau, acceptance))
        better, progress.best = prediction.tau > progress.best, max(progress.best, prediction.tau)
        if not self.leads:
            return
        with replacing(str(self.home / LOG)) as file:
            file.writelines(json.dumps(asdict(entry)) + "\n" for entry in progress.history)
        if better:
            config, tensors = drafter.pack()
            config["vocabulary"] = {"size": len(drafter.vocab), "coverage": round(self.vocab_coverage, 4)}
            tensors |= self.objective.weights(self._storage)  # not rounded to the target's precision
            about = (self.recipe.method, self.target, config, tensors, self._summary(prediction), None)
            save_drafter(self.home, *about, force=True)

    def judge(self, drafter: Any) -> Prediction:
        """τ on the held-out texts: by decoding where the objective makes passes that no record holds."""
        return (predict if self.objective.reads_features else decoded)(drafter, self.recorded)

    def _summary(self, prediction: Prediction) -> dict[str, Any]:
        predicted = {name: getattr(prediction, name) for name in ("tau", "acceptance", "rounds")}
        predicted |= {"tree": self.recipe.head.tree, "texts": len(self.recorded.tokens)}
        files = dict.fromkeys(Path(file).name for stage in self.stages for file in stage.data.files)
        return {
            "predicted": predicted,
            "trained_tokens": self.progress.trained,
            "examples": len(self._all),
            "minutes": self.progress.minutes,
            "stage": self.progress.stage,
            "step": self.progress.step,
            "recipe": self.recipe.model_dump(exclude={"data": {"files"}}),
            "data": [*files],
        }

    def _save(self, optimizer: Any) -> None:
        if not self.leads:
            return
        self._check_weights()
        state = {
            "objective": self.objective.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "progress": asdict(self.progress),
            "coverage": self.vocab_coverage,
            "vocab": self.objective._vocab,
            "data": None if optimizer is None else self._data_key,
        }
        write_checkpoint(self.home / STATE, state | self._made_by)
        self.checkpoint = self._place()

    def _place(self) -> str:
        stage = f" of stage {self.progress.stage + 1}" if len(self.stages) > 1 else ""
        return f"step {self.progress.step}{stage}"

    def _write_recipe(self) -> None:
        if self.leads:
            with replacing(str(self.home / RECIPE)) as file:
                file.write(f"{RUN_MARK}\n")
                yaml.safe_dump(self.recipe.model_dump(mode="json"), file, sort_keys=False)
            if not self._resume:  # --force may begin in another run's directory
                (self.home / STATE).unlink(missing_ok=True)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM waits for the end of a step, so that the checkpoint is complete."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        first = 0.0

        def stop(number: int, _: Any) -> None:
            nonlocal first
            first = first or time.monotonic()
            if self._stop and time.monotonic() - first > 1:  # a launcher may pass the same Ctrl-C on twice
                raise KeyboardInterrupt
            self._stop = number

        signals = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {number: signal.signal(number, stop) for number in signals}
        try:
            yield
        except KeyboardInterrupt:
            if self._stop:  # raise the signal again for its previous handler
                signal.signal(self._stop, before[self._stop])
                signal.raise_signal(self._stop)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to `floor`."""
    warmup = max(1, round(optimizer.warmup * steps))
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return optimizer.lr * (optimizer.floor + (1 - optimizer.floor) * (1 + math.cos(math.pi * share)) / 2)


def _adamw(module: torch.nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, settings.lr, settings.betas, weight_decay=settings.weight_decay)


def _mix(*numbers: int) -> int:
    """One seed from several numbers, the same in every process and on every machine."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed = ((seed ^ (number & 0xFFFFFFFF)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**63 - 1)
    return seed
