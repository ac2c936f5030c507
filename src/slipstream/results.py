"""Results: typed objects that a command returns, stores as JSON, reads back, and prints as a table."""

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from slipstream import provenance
from slipstream.core.target import Target
from slipstream.files import first_line, parsed, read_text, write_json
from slipstream.machine import SCHEMA, hardware, versions

if TYPE_CHECKING:
    from pandas import DataFrame

R = TypeVar("R", bound="Result")
Q = TypeVar("Q", bound="Report")
Margin = Annotated[
    float,
    PlainSerializer(lambda margin: margin if math.isfinite(margin) else None),  # JSON has no infinity
    BeforeValidator(lambda margin: math.inf if margin is None else margin),
]


class Part(BaseModel):
    """A part of a result. Its fields are the keys of its JSON object.

    Older files lack fields that have a default. Such a field is left out again when the part is written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def stored(self) -> dict[str, Any]:
        """The JSON object."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Result(Part, ABC):
    """What a command returns.

    Attributes:
        schema_version: of the JSON, where its key is `schema`.
        command: the command line, or the Python call, that made the result.
    """

    schema_version: int = Field(alias="schema")
    command: str = ""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """The table."""

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, color_system=None).print(self, soft_wrap=True)
        return text.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """The table, as a notebook shows it: without scripts, and every text escaped."""
        return html(self)

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of `to_pandas`, by column; one where a result has no rows of its own."""
        return [flat(self)]

    def to_pandas(self) -> "DataFrame":
        """The figures as a pandas DataFrame, a row for each row of the table. Names of nested figures have
        dots, as in `speedup.vanilla`. Raises ValueError where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ValueError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self._rows())

    def to_json(self) -> str:
        """The text of the JSON file."""
        return json.dumps(self.stored(), indent=1, ensure_ascii=False)

    def write(self, path: str) -> None:
        """Write the JSON file atomically. Where `path` cannot be written, ValueError names the file that
        holds the result instead."""
        write_json(path, self.stored())

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """The result in a JSON text. Raises ValueError for any other text."""
        value = parsed(text)
        if isinstance(value, dict):
            check_schema(value.get("schema", SCHEMA))
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"this JSON is no {cls.__name__}: {where or 'it'}: {first['msg']}") from error

    @classmethod
    def read(cls: type[R], path: str | PathLike[str]) -> R:
        """The result in a JSON file of this or an older version. Raises ValueError for any other file."""
        return cls.from_json(read_text(path, "result"))


class Report(Result):
    """What was measured on a target.

    Attributes:
        compiled: whether the target's passes were compiled.
        stopped: the error that ended the run early; the figures are those of the work until then.
        derived: what `benchmarks/derive.py` computed from the other fields.
    """

    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    target: str
    dtype: str
    compiled: bool = False
    stopped: str | None = None
    derived: dict[str, Any] | None = None

    @property
    def model(self) -> str:
        """The target as it was run, for people."""
        return f"{self.target}, {self.dtype}{', compiled' * self.compiled}"

    def stopped_by(self: Q, reason: str | None, **fields: Any) -> Q:
        """The same report, of a run that was not finished (None: it was). `fields`: what else changes."""
        return self if reason is None else self.model_copy(update={"stopped": reason, **fields})


def flat(part: Part | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The figures of a part, those of parts within it under names with dots. Lists of parts, and parts by
    name, such as the questions of a run, are left out."""
    figures: dict[str, Any] = {}
    for name, value in (part.model_dump() if isinstance(part, Part) else part).items():
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(nested, dict) for nested in within):
            continue
        figures |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return figures


def html(shown: Any) -> str:
    """A table, a text or a group of them as HTML. It holds no scripts, and every text is escaped."""
    if isinstance(shown, Group):
        return "".join(map(html, shown.renderables))
    if isinstance(shown, Figures):
        return shown.html()
    if isinstance(shown, Text):
        return f'<p style="white-space: pre-wrap; margin: 0.3em 0">{_escaped(shown)}</p>'
    return html(shown.__rich__())


def _escaped(text: Any) -> str:
    """A text of rich's, escaped; bold where it is."""
    escaped = escape(str(text))
    return f"<b>{escaped}</b>" if "bold" in str(getattr(text, "style", "")) else escaped


def reason_of(error: BaseException) -> str:
    """Why a run was stopped, for `stopped`."""
    interrupted = isinstance(error, KeyboardInterrupt)  # the text of `Interrupted` is of one answer
    return type(error).__name__ if interrupted else first_line(error)


def check_schema(number: Any) -> None:
    """Raise ValueError for a result that another version wrote in a form that this one does not know."""
    if number != SCHEMA:
        raise ValueError(f"it has schema {number!r}, and this version of Slipstream reads schema {SCHEMA}")


def made() -> dict[str, Any]:
    """The fields of a `Result` that is made now."""
    return {"schema": SCHEMA, "command": provenance.current()}


def heading(target: Target) -> dict[str, Any]:
    """The fields of a `Report` that is made now, on this machine."""
    machine = {"hardware": hardware(), "versions": versions()}
    return made() | machine | {"target": target.name, "dtype": target.precision, "compiled": target.compiles}


class Figures(Table):
    """A table of figures. Where the terminal is too narrow, each row becomes a few lines.

    Texts are printed as they are: a name may look like rich's markup.
    """

    def __init__(self, title: str | None, first: str, *others: str) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        self._title = title
        self.add_column(Text(first))
        for name in others:
            self.add_column(Text(name), justify="right")

    def add_row(self, *cells: Any, **style: Any) -> None:
        plain = style.get("style") or ""
        super().add_row(*(c if isinstance(c, Text) else Text(str(c), plain) for c in cells), **style)

    def html(self) -> str:
        """The table as HTML."""

        def row(tag: str, cells: Iterable[Any]) -> str:
            styled = zip(self.columns, cells, strict=True)
            cells = (
                f'<{tag} style="text-align: {column.justify}">{_escaped(cell)}</{tag}>'
                for column, cell in styled
            )
            return f"<tr>{''.join(cells)}</tr>"

        title = f"<caption>{escape(self._title)}</caption>" if self._title else ""
        head = row("th", (column.header for column in self.columns))
        rows = zip(*(column.cells for column in self.columns), strict=True)
        body = "".join(row("td", cells) for cells in rows)
        return f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self._title:
            yield Text(self._title, "bold")
        if Measurement.get(console, options.update_width(10_000), self).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)  # type: ignore[misc]
        else:
            yield from self._stacked(options.max_width)

    def _stacked(self, width: int) -> Iterator[Text]:
        """Each row's name on a line, and its figures on the lines below."""
        columns: list[Any] = [(column.header, [*column.cells]) for column in self.columns]
        (first, names), *others = columns
        for row, name in enumerate(names):
            yield Text.assemble((f"{first} ", "dim"), name) if len(first) + len(name) < width else name
            line = Text()
            for header, cells in others:
                cell, wide = cells[row], max(map(len, cells))
                pair = Text.assemble("  ", (str(header), "dim"), " " * (1 + wide - len(cell)), cell)
                if line and cell and len(line) + len(pair) > width:
                    yield line
                    line = Text()
                line += pair if cell else ""
            yield line
        yield Text()
