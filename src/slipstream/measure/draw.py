"""Pictures of what was measured, as SVG."""

from typing import Any

from slipstream.training.show import picture

LEGEND = {"frameon": False, "fontsize": "small"}


def draw_costs(report: dict[str, Any], path: str) -> None:
    """A pass against its rows, for every context and batch, and against the time that reading the weights
    takes."""
    with picture(path, 1) as (ax,):
        for context, batch in dict.fromkeys((entry["context"], entry["batch"]) for entry in report["passes"]):
            some = [e for e in report["passes"] if (e["context"], e["batch"]) == (context, batch)]
            label = f"{context} tokens, {batch} text{'s' if batch > 1 else ''}"
            ax.plot([e["rows"] for e in some], [e["ms"] for e in some], marker="o", markersize=3, label=label)
        limit = 1e3 * report["weights_gb"] / report["bandwidth_gb_s"]
        ax.axhline(limit, color="gray", linestyle="--", linewidth=1, label="reading the weights")
        ax.set(xlabel="rows of a pass", ylabel="milliseconds", ylim=(0, None))
        ax.legend(**LEGEND)


def draw_tuned(report: dict[str, Any], path: str) -> None:
    """Speed-up over plain decoding against the node budget: predicted for optimal static trees, and as
    timed."""
    with picture(path, len(report["temperatures"])) as axes:
        for ax, found in zip(axes, report["temperatures"], strict=True):
            for seen in found["proposals"]:
                nodes, estimates = zip(
                    *((size["nodes"], size["estimate"]) for size in seen["budgets"]), strict=True
                )
                (line,) = ax.plot(nodes, estimates, linewidth=1, label=f"{seen['proposal']}, predicted")
                timed = [entry for entry in found["candidates"] if entry["proposal"] == seen["proposal"]]
                ups = [entry["speedup"] for entry in timed]
                at = [entry["nodes"] for entry in timed]
                ax.scatter(at, ups, s=14, color=line.get_color(), label=f"{seen['proposal']}, timed")
            ax.axhline(1.0, color="gray", linestyle="--", linewidth=1, label="plain")
            ax.set(
                title=f"T = {found['temperature']:g}",
                xlabel="nodes",
                ylabel="speed-up over plain",
                ylim=(0, None),
            )
            ax.legend(**LEGEND)
