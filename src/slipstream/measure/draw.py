"""Pictures of what was measured, as SVG."""

from slipstream.measure.cost import CostReport
from slipstream.measure.tuned import TuneReport
from slipstream.picture import picture

LEGEND = {"frameon": False, "fontsize": "small"}


def draw_costs(report: CostReport, path: str) -> None:
    """A pass against its rows, for every context and batch, and against the time that reading the weights
    takes."""
    with picture(path, 1) as (ax,):
        for context, batch in dict.fromkeys((cost.context, cost.batch) for cost in report.passes):
            some = [cost for cost in report.passes if (cost.context, cost.batch) == (context, batch)]
            label = f"{context} tokens, {batch} text{'s' if batch > 1 else ''}"
            rows, ms = [cost.rows for cost in some], [cost.ms for cost in some]
            ax.plot(rows, ms, marker="o", markersize=3, label=label)
        ax.axhline(report.limit_ms, color="gray", linestyle="--", linewidth=1, label="reading the weights")
        ax.set(xlabel="rows of a pass", ylabel="milliseconds", ylim=(0, None))
        ax.legend(**LEGEND)


def draw_tuned(report: TuneReport, path: str) -> None:
    """Speed-up over plain decoding against the node budget: predicted for optimal static trees, and as
    timed."""
    with picture(path, len(report.temperatures)) as axes:
        for ax, tuned in zip(axes, report.temperatures, strict=True):
            for proposed in tuned.proposals:
                name, sizes = proposed.proposal, proposed.budgets
                nodes, estimates = [size.nodes for size in sizes], [size.estimate for size in sizes]
                (line,) = ax.plot(nodes, estimates, linewidth=1, label=f"{name}, predicted")
                timed = [each for each in tuned.candidates if each.proposal == name]
                at, speedups = [each.nodes for each in timed], [each.speedup for each in timed]
                ax.scatter(at, speedups, s=14, color=line.get_color(), label=f"{name}, timed")
            ax.axhline(1.0, color="gray", linestyle="--", linewidth=1, label="plain")
            title = f"T = {tuned.temperature:g}"
            ax.set(title=title, xlabel="nodes", ylabel="speed-up over plain", ylim=(0, None))
            ax.legend(**LEGEND)
