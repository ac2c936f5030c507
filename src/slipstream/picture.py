"""Pictures of figures, as SVG."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.files import replacing


@contextmanager
def picture(path: str, columns: int, otherwise: str = "") -> Iterator[Any]:
    """Axes side by side, saved as an SVG afterwards. Where the file cannot be written, raises ValueError with
    `otherwise` at its end."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Texts stay texts, which is smaller; the same figures give the same file.
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "slipstream"}
    size = (4.5 * columns, 3.2)
    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        yield axes[0]
        for ax in axes[0]:
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        try:
            with replacing(path) as file:
                figure.savefig(file, format="svg", metadata={"Date": None})
        except ValueError as error:
            raise ValueError(f"picture: {error}{otherwise}") from error
    finally:
        pyplot.close(figure)
