"""Checks of the machine: whether passes are as quick as they can be here, and trees as large as pays."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from slipstream.core.tree_spec import Shape
from slipstream.kernels.weight_packing import HAS_BF16
from slipstream.measure.doctor.diagnosis import Patient, Seen, Unmeasured, cores
from slipstream.measure.results import Size
from slipstream.measure.tune import every_size
from slipstream.provenance import suggested

PAYS = 1.15  # what would be so many times as quick is worth a word
BUSY = 0.25  # of the processors, taken by others
SPANS = (1, 2, 4, 8, 16, 32)  # texts at once


def uncompiled(patient: Patient) -> Seen:
    """Passes of a few blocks, compiled and not."""
    patient.progress("passes, compiled and not")
    plain, quick = _alternated(*(partial(patient.small_pass, compile=how) for how in (False, True)))
    return Seen(
        found=not patient.target.compiles and plain / quick > PAYS,
        measured=f"{1e3 * plain:.2f} ms; compiled {1e3 * quick:.2f}",
        normal=f"below {PAYS} × compiled",
        cause=f"passes are not compiled, and cost {plain / quick:.2f} times as much as compiled ones",
        remedy="add --compile (from Python: load_target(…, compile=True))",
        figures={"plain_ms": 1e3 * plain, "compiled_ms": 1e3 * quick},
    )


def precision(patient: Patient) -> Seen:
    """Passes of a few blocks in this precision and in bfloat16."""
    here = patient.target.device.type
    if patient.target.quantize is not None or not (HAS_BF16 or here != "cpu"):
        raise Unmeasured("quantised" if patient.target.quantize else "no bf16 instructions here")
    if patient.target.dtype == torch.bfloat16:
        raise Unmeasured("in bfloat16 already")
    patient.progress("passes in bfloat16")
    own, half = _alternated(patient.small_pass, partial(patient.small_pass, torch.bfloat16))
    return Seen(
        found=own / half > PAYS,
        measured=f"{1e3 * own:.2f} ms in {patient.target.dtype_name}; bfloat16 {1e3 * half:.2f}",
        normal=f"below {PAYS} × bfloat16",
        cause=f"this machine multiplies bfloat16, in which passes cost {own / half:.2f} times less than in "
        f"{patient.target.dtype_name}",
        remedy="add --dtype bfloat16 (or auto, the default)",
        figures={"own_ms": 1e3 * own, "bfloat16_ms": 1e3 * half},
    )


def threads(patient: Patient) -> Seen:
    """Passes with other numbers of threads, and what other processes take meanwhile."""
    if patient.target.device.type != "cpu":
        raise Unmeasured("not on a CPU")
    patient.progress("passes with other numbers of threads")
    given, there = torch.get_num_threads(), cores()
    spent = dict[int, float]()
    with watched() as others:
        for number in dict.fromkeys((given, there, (there + 1) // 2, 1)):
            with _threads(number):
                spent[number] = patient.small_pass()
    best = min(spent, key=lambda number: spent[number])
    slow, busy = spent[given] / spent[best], others[0]
    named = (name for name in sorted(os.environ) if name.startswith(("OMP_", "KMP_")))
    known = " ".join(f"{name}={os.environ[name]}" for name in named)
    times = ", ".join(f"{number}: {1e3 * spent[number]:.2f}" for number in sorted(spent))
    remedies = []
    if slow > PAYS:
        remedies.append(f"set OMP_NUM_THREADS={best}" + f" (now {known or 'no OMP_ settings'})")
    if busy > BUSY:
        remedies.append("end what else runs here, or give this process cores of its own (taskset -c …)")
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active" and given >= there:
        remedies.append("unset OMP_WAIT_POLICY: threads that wait take the cores of those that work")
    return Seen(
        found=slow > PAYS or busy > BUSY,
        measured=f"{given} threads; ms by threads: {times}; others take {busy:.0%}",
        normal=f"within {PAYS} × of the best; others below {BUSY:.0%}",
        cause=f"{given} threads on {there} processors cost {slow:.2f} times as much as {best}, and other "
        f"processes take {busy:.0%} of the processors",
        remedy="; ".join(remedies),
        figures={"threads": given, "best": best, "slower": slow, "others": busy},
    )


def shallow(patient: Patient) -> Seen:
    """What deeper trees promise."""
    shape, own = _tree(patient)
    level = _best(patient, lambda each: each.depth <= shape.depth)
    deeper = _best(patient, lambda each: each.depth > shape.depth)
    last = patient.rates[min(shape.depth, len(patient.rates)) - 1][0]
    gain = deeper.estimate / max(own, level.estimate)
    return Seen(
        found=gain > PAYS,
        measured=f"depth {shape.depth}: × {own:.2f}, last right {last:.0%}; deeper: × {deeper.estimate:.2f}",
        normal=f"deeper below {PAYS} × as quick",
        cause=f"a tree of depth {shape.depth} ends where guesses are still right ({last:.0%}): one of depth "
        f"{deeper.depth} promises {gain:.2f} times its speed",
        remedy=_retuned(patient, deeper),
        figures={"own": own, "deeper": deeper.estimate, "last": last},
    )


def oversized(patient: Patient) -> Seen:
    """What smaller trees promise."""
    shape, own = _tree(patient)
    smaller = _best(patient, lambda each: each.nodes < shape.nodes and each.depth <= shape.depth)
    gain = smaller.estimate / own
    return Seen(
        found=gain > PAYS,
        measured=f"{shape.nodes} rows: × {own:.2f}; fewer: × {smaller.estimate:.2f}",
        normal=f"fewer below {PAYS} × as quick",
        cause=f"a pass over {shape.nodes} rows costs more here than its guesses bring: {smaller.nodes} rows "
        f"promise {gain:.2f} times its speed",
        remedy=_retuned(patient, smaller),
        figures={"own": own, "smaller": smaller.estimate},
    )


def crowded(patient: Patient) -> Seen:
    """What the tree brings for so many texts at once, and whether any would bring something."""
    alone, here = _speedup(patient, 1), _speedup(patient, patient.batch)
    remedy, best = "", _best(patient, lambda each: True)
    if best.estimate >= 1:
        remedy = f"a smaller tree: {_retuned(patient, best)}; or "
    if alone >= 1:
        pay = [texts for texts in SPANS if texts < patient.batch and _speedup(patient, texts) >= 1]
        remedy += f"at most {max(pay, default=1)} texts at once (batch={max(pay, default=1)}); or "
    cause = f"{patient.batch} texts at once fill the processor: rows of guesses cost more than they bring"
    if patient.batch == 1:
        cause = "rows of guesses cost more here than they bring, whatever the tree"
    return Seen(
        found=here < 1 and (alone >= 1 or best.estimate < 1),
        measured=f"{patient.batch} at once: × {here:.2f}; one: × {alone:.2f}",
        normal="above × 1 of plain decoding",
        cause=cause,
        remedy=f"{remedy}decode plainly: --drafter vanilla",
        figures={"here": here, "alone": alone},
    )


def _tree(patient: Patient) -> tuple[Shape, float]:
    """The tree in use, and its estimated speed-up."""
    if patient.chooses:
        raise Unmeasured("this drafter chooses a tree in every round")
    if (seen := crowded(patient)).found:
        raise Unmeasured("drafting does not pay for so many texts")
    return patient.grower.shape, seen.figures["here"]


def _best(patient: Patient, fits: Callable[[Size], bool]) -> Size:
    """The best static tree among those that fit; plain decoding if none does."""
    some = [each for each in every_size(patient.rates, patient.costs(patient.batch)) if fits(each)]
    return max(some, key=lambda each: each.estimate, default=Size(nodes=1, depth=0, tree="", estimate=1.0))


def _retuned(patient: Patient, size: Size) -> str:
    """How to take another tree."""
    if not size.depth:
        return "decode plainly: --drafter vanilla"
    tree = f"best-first-{size.depth}x{size.nodes}"
    head = patient.spec.replace(tree=None)
    return (
        f"--drafter '{patient.spec.replace(tree=tree)}', or let {suggested(f'tune --drafter {head}')} choose"
    )


def _speedup(patient: Patient, texts: int) -> float:
    """Of the tree in use, or of the best one where the drafter chooses."""
    costs = patient.costs(texts)
    if patient.chooses:
        return max((each.estimate for each in every_size(patient.rates, costs)), default=1.0)
    shape = patient.grower.shape
    return costs.speedup(patient.drafted.tau, shape.nodes, shape.depth)


def _alternated(*passes: Callable[[], float]) -> list[float]:
    """The least of three medians each, in turn."""
    laps = [[one() for one in passes] for _ in range(3)]
    return [min(times) for times in zip(*laps, strict=True)]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Another number of threads, for as long as this lasts."""
    kept = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


@contextmanager
def watched() -> Iterator[list[float]]:
    """Yields a list that holds, at the end, the share of the processors that other processes took."""
    others = [0.0]
    before = _ticks(), _own_ticks()
    yield others
    (busy, total), own = _ticks(), _own_ticks()
    taken = (busy - before[0][0]) - (own - before[1])
    others[0] = max(0.0, taken / max(total - before[0][1], 1))


def _ticks() -> tuple[float, float]:
    """Ticks that all processors worked, and all ticks; zeros where the system does not say."""
    try:
        fields = [float(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    return sum(fields) - fields[3] - fields[4], sum(fields)  # idle, and waiting for a disk


def _own_ticks() -> float:
    spent = os.times()
    return (spent.user + spent.system) * os.sysconf("SC_CLK_TCK")
