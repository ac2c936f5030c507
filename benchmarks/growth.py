"""How τ grows with the tokens that a head learns from, and how the first depth of a chain: two laws through
what heads.py measured.

Heads of one method are the arms: trained by one recipe, each from its first step to its last on its own
number of tokens, which it sees once. Arms of about as many tokens are seeds.

    τ(D) = gain · log2 D + a       each doubling adds as much
    τ(D) = limit − A · D^−β        each doubling adds less

Far beyond the longest arm nothing tells which of the two holds, so both are given. `miss` says what each is
worth: the law through the shorter arms less what the longest arm found. `derive.py` stores the laws beside
the result, and `figures.py` draws them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import digits
from heads import HeadsReport
from slipstream.plotting import picture

Numbers = NDArray[np.float64]
Law = Callable[[Numbers], Numbers]
POWERS = np.linspace(0.05, 2, 391)  # of the second law, tried in turn
FIRST = "first depth"
MANY = "heads_growth_kinds.json"  # arms of answers of many kinds, beside those of greedy ones
AHEAD = (2e6, 4e6, 8e6, 16e6, 32e6)  # tokens


def steady(tokens: Numbers, taus: Numbers) -> tuple[dict[str, float], Law]:
    """The first law by least squares."""
    gain, a = map(float, np.polyfit(np.log2(tokens), taus, 1))
    return {"gain": gain}, lambda D: gain * np.log2(D) + a


def levelling(tokens: Numbers, taus: Numbers) -> tuple[dict[str, float], Law]:
    """The second law by least squares, of the best power."""

    def fitted(power: float) -> tuple[float, Any]:
        columns = np.stack([np.ones_like(tokens), -((tokens / 1e6) ** -power)], 1)
        found = np.linalg.lstsq(columns, taus)[0]
        return float(((columns @ found - taus) ** 2).sum()), found

    power = float(min(POWERS, key=lambda power: fitted(power)[0]))
    limit, A = map(float, fitted(power)[1])
    return {"limit": limit, "power": power}, lambda D: limit - A * (D / 1e6) ** -power


LAWS = {"steady": steady, "levelling": levelling}


def arms(report: HeadsReport) -> Iterator[tuple[str, str, Numbers, Numbers]]:
    """Method, tree, tokens and τ; of chains also "… first depth" and the share accepted there."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for head in report.heads.values():
        assert head.trained_tokens is not None
        for tree in head.trees:
            grown = {tree.tree: tree.tau}
            if tree.tree.startswith("chain"):
                grown[f"{tree.tree}, {FIRST}"] = tree.acceptance_by_depth[0]
            for name, value in grown.items():
                found.setdefault((head.method, name), []).append((head.trained_tokens, value))
    for (method, name), points in found.items():
        tokens, taus = np.array(sorted(points)).T
        yield method, name, tokens, taus


def growth(result: dict[str, Any]) -> dict[str, Any]:
    """Both laws of each method and tree, what they promise, and by how much they miss the longest arm."""
    laws: dict[str, Any] = {}
    for method, tree, tokens, taus in arms(HeadsReport.model_validate(result)):
        doublings = np.round(np.log2(tokens / tokens.max()))  # seeds shuffle, so tokens differ a little
        shorter = doublings < 0
        seeds = [taus[doublings == each] for each in np.unique(doublings)]
        entry: dict[str, Any] = {"spread_of_seeds": max(float(np.ptp(some)) for some in seeds)}
        for name, law in LAWS.items():
            found, fitted = law(tokens, taus)
            _, before = law(tokens[shorter], taus[shorter])
            miss = float(before(tokens[~shorter]).mean() - taus[~shorter].mean())
            ahead = {f"{D:.0f}": float(fitted(np.array(D))) for D in AHEAD}
            entry[name] = {**found, "miss": miss, "ahead": ahead}
        laws.setdefault(method, {})[tree] = digits(entry)
    return laws


def draw(result: Path, path: str) -> None:
    """τ against tokens for each tree, with both laws. Squares are arms of answers of many kinds. Raises
    ValueError."""
    grown, many = (
        [arm for arm in arms(HeadsReport.read(each)) if FIRST not in arm[1]]
        for each in (result, result.with_name(MANY))
    )
    trees, colours = list(dict.fromkeys(tree for _, tree, _, _ in grown)), {}
    with picture(path, len(trees)) as axes:
        for method, tree, tokens, taus in grown:
            ax = axes[trees.index(tree)]
            (points,) = ax.plot(tokens / 1e6, taus, "o", markersize=4, label=method)
            colours[method] = points.get_color()
            D = np.geomspace(tokens.min(), AHEAD[-1], 60)
            for law, style in ((steady, ":"), (levelling, "-")):
                ax.plot(D / 1e6, law(tokens, taus)[1](D), style, color=colours[method], linewidth=1)
            ax.set(xlabel="tokens learnt from (millions)", ylabel="τ", title=tree, xscale="log")
        for method, tree, tokens, taus in many:
            axes[trees.index(tree)].plot(tokens / 1e6, taus, "s", color=colours[method], fillstyle="none")
        axes[0].plot([], [], "s", color="black", fillstyle="none", label="answers of many kinds")
        axes[0].legend(frameon=False, fontsize=8, loc="upper left")
