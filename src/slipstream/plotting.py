"""Pictures of figures, as SVG or PNG."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.files import replacing

# Okabe and Ito's colours, which colour-blind readers tell apart; in print the lines' styles do.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":", "-", "--", "-.")


@contextmanager
def picture(path: str | None, columns: int, otherwise: str = "") -> Iterator[Any]:
    """Axes side by side on white, saved afterwards: as a PNG where the path ends in .png, else as an SVG,
    and nowhere where there is no path. A notebook shows their figure. Where the file cannot be written,
    raises ValueError with `otherwise` at its end."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            self.savefig(drawn := io.BytesIO(), format="png", dpi=160)
            return drawn.getvalue()

    style: Any = {
        "axes.prop_cycle": cycler(color=COLOURS, linestyle=STYLES),
        "font.sans-serif": ["DejaVu Sans", "sans-serif"],
        "svg.fonttype": "none",  # texts stay texts, which is smaller
        "svg.hashsalt": "slipstream",  # the same figures give the same file
    }
    with matplotlib.rc_context(style):  # pictures of the caller's own stay as they are
        figure = Shown(figsize=(4.5 * columns, 3.2), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)
        yield axes[0]
        for ax in axes[0]:
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        if path is None:
            return
        try:
            with replacing(path) as file:
                if path.lower().endswith(".png"):
                    file.buffer.write(figure._repr_png_())
                else:
                    figure.savefig(text := io.StringIO(), format="svg", metadata={"Date": None})
                    file.write(_slim(text.getvalue()))
        except ValueError as error:
            raise ValueError(f"picture: {error}{otherwise}") from error


def check_picture(path: str | None) -> None:
    """Raise ValueError for a name of another form than SVG, which a name without a suffix is, and PNG."""
    suffix = Path(path).suffix if path is not None else ""
    if suffix.lower() not in ("", ".svg", ".png"):
        raise ValueError(f"picture {path} is to be {suffix}: give a name that ends in .svg or .png")


def _slim(svg: str) -> str:
    """The same picture without indentation and comments, with coordinates of two decimals, and with each
    style that is used several times written once."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]).replace(" \n", " "), svg)
    times = Counter(re.findall(r'style="([^"]*)"', svg))
    shared = [style for style, count in times.items() if count > 2]
    for i, style in enumerate(shared):
        svg = svg.replace(f'style="{style}"', f'class="s{i}"')
    rules = "".join(f".s{i}{{{style}}}" for i, style in enumerate(shared))
    return re.sub(r"\n\s*", "\n", svg.replace("</style>", f"{rules}</style>", 1))
