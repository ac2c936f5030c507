"""Pictures of what was measured, as SVG."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def _figure(path: str, columns: int) -> Iterator[Any]:
    """Axes to fill; saved where nothing went wrong. Raises ValueError where the file cannot be written."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(4.5 * columns, 3.2), layout="constrained", squeeze=False)
    try:
        yield axes[0]
        for ax in axes[0]:
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, fontsize="small")
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"picture {path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def draw_costs(report: dict[str, Any], path: str) -> None:
    """A pass against its rows, for every context and batch, and against the time that reading the weights takes."""
    with _figure(path, 1) as (ax,):
        for context, batch in dict.fromkeys((entry["context"], entry["batch"]) for entry in report["passes"]):
            some = [e for e in report["passes"] if (e["context"], e["batch"]) == (context, batch)]
            label = f"{context} tokens, {batch} text{'s' if batch > 1 else ''}"
            ax.plot([e["rows"] for e in some], [e["ms"] for e in some], marker="o", markersize=3, label=label)
        limit = 1e3 * report["weights_gb"] / report["bandwidth_gb_s"]
        ax.axhline(limit, color="gray", linestyle="--", linewidth=1, label="reading the weights")
        ax.set(xlabel="rows of a pass", ylabel="milliseconds", ylim=(0, None))


def draw_tuned(report: dict[str, Any], path: str) -> None:
    """Speed-up over plain decoding against the node budget: estimated for optimal static trees, and as looked at."""
    plain = report["plain"]["tokens_per_second"]
    with _figure(path, len(report["temperatures"])) as axes:
        for ax, found in zip(axes, report["temperatures"], strict=True):
            for seen in found["proposals"]:
                best: dict[int, float] = {}
                for size in seen["budgets"]:
                    best[size["nodes"]] = max(best.get(size["nodes"], 0.0), size["estimate"] / plain)
                (line,) = ax.plot(list(best), list(best.values()), linewidth=1, label=f"{seen['proposal']}, estimated")
                ups = [entry["tokens_per_second"] / plain for entry in seen["candidates"]]
                nodes = [entry["nodes"] for entry in seen["candidates"]]
                ax.scatter(nodes, ups, s=14, color=line.get_color(), label=f"{seen['proposal']}, drafted and timed")
            ax.axhline(1.0, color="gray", linestyle="--", linewidth=1, label="plain")
            ax.set(title=f"T = {found['temperature']:g}", xlabel="nodes", ylabel="speed-up over plain", ylim=(0, None))
