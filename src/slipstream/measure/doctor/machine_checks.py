"""Checks of the machine: whether passes are as quick as they can be here, and trees as large as pays."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from slipstream.core.tree_spec import TreeSpec
from slipstream.kernels.weight_packing import HAS_BF16
from slipstream.measure.doctor.diagnosis import Diagnosis, Outcome, Unmeasured
from slipstream.measure.tune import every_size
from slipstream.measure.tune_report import Size
from slipstream.provenance import suggested

PAYS = 1.15  # what would be so many times as quick is worth a word
BUSY = 0.25  # of the processors, taken by others
BATCHES = (1, 2, 4, 8, 16, 32)  # texts at once


def uncompiled(diagnosis: Diagnosis) -> Outcome:
    """Passes of a few blocks, compiled and not."""
    if diagnosis.target.decoder is not None:
        raise Unmeasured("its layers are one call of our kernels, which nothing compiles")
    diagnosis.progress("passes, compiled and not")
    plain, compiled = _alternated(*(partial(diagnosis.small_pass, compile=how) for how in (False, True)))
    return Outcome(
        found=not diagnosis.target.compiles and plain / compiled > PAYS,
        measured=f"{1e3 * plain:.2f} ms; compiled {1e3 * compiled:.2f}",
        normal=f"below {PAYS} × compiled",
        cause=f"passes are not compiled, and cost {plain / compiled:.2f} times as much as compiled ones",
        remedy="add --compile (from Python: load_target(…, compile=True))",
        figures={"plain_ms": 1e3 * plain, "compiled_ms": 1e3 * compiled},
    )


def precision(diagnosis: Diagnosis) -> Outcome:
    """Passes of a few blocks in this precision and in bfloat16."""
    target = diagnosis.target
    if target.quantize is not None:
        raise Unmeasured("quantised")
    if not HAS_BF16 and target.device.type == "cpu":
        raise Unmeasured("no bf16 instructions here")
    if target.dtype == torch.bfloat16:
        raise Unmeasured("in bfloat16 already")
    diagnosis.progress("passes in bfloat16")
    own, half = _alternated(diagnosis.small_pass, partial(diagnosis.small_pass, torch.bfloat16))
    return Outcome(
        found=own / half > PAYS,
        measured=f"{1e3 * own:.2f} ms in {target.dtype_name}; bfloat16 {1e3 * half:.2f}",
        normal=f"below {PAYS} × bfloat16",
        cause=f"this machine multiplies bfloat16, in which passes cost {own / half:.2f} times less than in "
        f"{target.dtype_name}",
        remedy="add --dtype bfloat16 (or auto, the default)",
        figures={"own_ms": 1e3 * own, "bfloat16_ms": 1e3 * half},
    )


def threads(diagnosis: Diagnosis) -> Outcome:
    """Passes with other numbers of threads, and what other processes take meanwhile."""
    if diagnosis.target.device.type != "cpu":
        raise Unmeasured("not on a CPU")
    diagnosis.progress("passes with other numbers of threads")
    now, processors, seconds = torch.get_num_threads(), cores(), dict[int, float]()
    before = *_ticks(), _own_ticks()
    try:
        for number in dict.fromkeys((now, processors, (processors + 1) // 2, 1)):
            torch.set_num_threads(number)
            seconds[number] = diagnosis.small_pass()
    finally:
        torch.set_num_threads(now)
    busy, total, own = (b - a for a, b in zip(before, (*_ticks(), _own_ticks()), strict=True))
    others = max(0.0, (busy - own) / max(total, 1))
    best = min(seconds, key=lambda number: seconds[number])
    slower = seconds[now] / seconds[best]
    names = (name for name in sorted(os.environ) if name.startswith(("OMP_", "KMP_")))
    settings = " ".join(f"{name}={os.environ[name]}" for name in names)
    times = ", ".join(f"{number}: {1e3 * seconds[number]:.2f}" for number in sorted(seconds))
    remedies = {
        f"set OMP_NUM_THREADS={best} (now {settings or 'no OMP_ settings'})": slower > PAYS,
        "end what else runs here, or give this process cores of its own (taskset -c …)": others > BUSY,
        "unset OMP_WAIT_POLICY: threads that wait take the cores of those that work": now >= processors
        and os.environ.get("OMP_WAIT_POLICY", "").lower() == "active",
    }
    return Outcome(
        found=slower > PAYS or others > BUSY,
        measured=f"{now} threads; ms by threads: {times}; others take {others:.0%}",
        normal=f"within {PAYS} × of the best; others below {BUSY:.0%}",
        cause=f"{now} threads on {processors} processors cost {slower:.2f} times as much as {best}, and "
        f"other processes take {others:.0%} of the processors",
        remedy="; ".join(remedy for remedy, helps in remedies.items() if helps),
        figures={"threads": now, "best": best, "slower": slower, "others": others},
    )


def shallow(diagnosis: Diagnosis) -> Outcome:
    """What deeper trees promise."""
    spec, own = _tree(diagnosis)
    level = _best(diagnosis, lambda size: size.depth <= spec.depth)
    deeper = _best(diagnosis, lambda size: size.depth > spec.depth)
    last = diagnosis.rates[min(spec.depth, len(diagnosis.rates)) - 1][0]
    gain = deeper.estimate / max(own, level.estimate)
    return Outcome(
        found=gain > PAYS,
        measured=f"depth {spec.depth}: × {own:.2f}, last right {last:.0%}; deeper: × {deeper.estimate:.2f}",
        normal=f"deeper below {PAYS} × as quick",
        cause=f"a tree of depth {spec.depth} ends where guesses are still right ({last:.0%}): one of depth "
        f"{deeper.depth} promises {gain:.2f} times its speed",
        remedy=_with_tree(diagnosis, deeper),
        figures={"own": own, "deeper": deeper.estimate, "last": last},
    )


def oversized(diagnosis: Diagnosis) -> Outcome:
    """What smaller trees promise."""
    spec, own = _tree(diagnosis)
    smaller = _best(diagnosis, lambda size: size.nodes < spec.nodes and size.depth <= spec.depth)
    gain = smaller.estimate / own
    return Outcome(
        found=gain > PAYS,
        measured=f"{spec.nodes} rows: × {own:.2f}; fewer: × {smaller.estimate:.2f}",
        normal=f"fewer below {PAYS} × as quick",
        cause=f"a pass over {spec.nodes} rows costs more here than its guesses bring: {smaller.nodes} rows "
        f"promise {gain:.2f} times its speed",
        remedy=_with_tree(diagnosis, smaller),
        figures={"own": own, "smaller": smaller.estimate},
    )


def crowded(diagnosis: Diagnosis) -> Outcome:
    """What the tree brings for so many texts at once, and whether any would bring something."""
    batch = diagnosis.batch
    alone, together, best = _speedup(diagnosis, 1), _speedup(diagnosis, batch), _best(diagnosis)
    remedy = f"a smaller tree: {_with_tree(diagnosis, best)}; or " if best.estimate >= 1 else ""
    if alone >= 1:
        pay = [texts for texts in BATCHES if texts < batch and _speedup(diagnosis, texts) >= 1]
        remedy += f"at most {max(pay, default=1)} texts at once (batch={max(pay, default=1)}); or "
    cause = f"{batch} texts at once fill the processor: rows of guesses cost more than they bring"
    if batch == 1:
        cause = "rows of guesses cost more here than they bring, whatever the tree"
    return Outcome(
        found=together < 1 and (alone >= 1 or best.estimate < 1),
        measured=f"{batch} at once: × {together:.2f}; one: × {alone:.2f}",
        normal="above × 1 of plain decoding",
        cause=cause,
        remedy=f"{remedy}decode plainly: --drafter vanilla",
        figures={"here": together, "alone": alone},
    )


def _tree(diagnosis: Diagnosis) -> tuple[TreeSpec, float]:
    """The tree in use, and its estimated speed-up."""
    if diagnosis.drafter.candidate_trees:
        raise Unmeasured("this drafter chooses a tree in every round")
    if (outcome := crowded(diagnosis)).found:
        raise Unmeasured("drafting does not pay for so many texts")
    return diagnosis.proposer.tree_spec, outcome.figures["here"]


def _best(diagnosis: Diagnosis, fits: Callable[[Size], bool] = lambda _: True) -> Size:
    """The best static tree among those that fit; plain decoding if none does."""
    sizes = [size for size in every_size(diagnosis.rates, diagnosis.costs(diagnosis.batch)) if fits(size)]
    return max(sizes, key=lambda size: size.estimate, default=Size(nodes=1, depth=0, tree="", estimate=1.0))


def _with_tree(diagnosis: Diagnosis, size: Size) -> str:
    """How to take another tree."""
    if not size.depth:
        return "decode plainly: --drafter vanilla"
    spec = diagnosis.spec.replace(tree=f"best-first-{size.depth}x{size.nodes}")
    tune = suggested(f"tune --drafter {diagnosis.spec.replace(tree=None)}")
    return f"--drafter '{spec}', or let {tune} choose"


def _speedup(diagnosis: Diagnosis, batch: int) -> float:
    """Of the tree in use, or of the best one where the drafter chooses."""
    costs = diagnosis.costs(batch)
    if diagnosis.drafter.candidate_trees:
        return max((size.estimate for size in every_size(diagnosis.rates, costs)), default=1.0)
    spec = diagnosis.proposer.tree_spec
    return costs.speedup(diagnosis.predicted.tau, spec.nodes, spec.depth)


def _alternated(*passes: Callable[[], float]) -> list[float]:
    """The least of three medians each, in turn."""
    laps = [[one() for one in passes] for _ in range(3)]
    return [min(times) for times in zip(*laps, strict=True)]


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ticks() -> tuple[float, float]:
    """Ticks that all processors worked, and all ticks; zeros where the system does not say."""
    try:
        fields = [float(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    return sum(fields) - fields[3] - fields[4], sum(fields)  # idle, and waiting for a disk


def _own_ticks() -> float:
    times = os.times()
    return (times.user + times.system) * os.sysconf("SC_CLK_TCK")
