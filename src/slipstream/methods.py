"""The table of methods: one entry for each way to draft.

An entry names its parts as "module:Name" and imports them when they are used, so that the command line reads
this table without loading torch.
"""

import logging
import os
import sys
from collections import UserDict
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from slipstream.files import first_line

PLUGINS = "slipstream.methods"  # the group of entry points under which packages name their plugins
SHIPPED = Path(__file__).parent / "weights"  # weights/<target>/<method>: drafter directories in the package


@dataclass(frozen=True)
class Method:
    """All that belongs to one method.

    Attributes:
        name: what specs, recipes and drafter directories call it.
        help: one line for lists of drafters.
        make: function that makes a drafter from its name alone. Options of a spec are its keyword arguments;
            arguments called `target`, `temperature` and `texts` are filled by `load_drafter`.
        needs: the option that `make` cannot do without, of a method whose weights may ship as well.
        drafter: class of the trained drafter, whose `load` reads a drafter directory. Without `make`, or
            without what it needs, the method's name stands for the weights that ship for the target.
        objective: class that trains it.
        recipe: class of its settings.
        layouts: public formats of its weights by name, the default first.
        tunes: whether `tune` can choose its tree.
    """

    name: str
    help: str
    make: str | None = None
    needs: str | None = None
    drafter: str | None = None
    objective: str | None = None
    recipe: str | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    tunes: bool = False

    @property
    def ships(self) -> bool:
        """Whether its weights may ship: its name alone stands for them."""
        return self.make is None or self.needs is not None

    def made(self, options: Collection[str]) -> bool:
        """Whether `make` makes the drafter of a spec with these options."""
        return self.make is not None and (self.needs is None or self.needs in options)

    @property
    def shipped(self) -> list[str]:
        """The targets that weights ship for."""
        return sorted(home.parts[-3] for home in SHIPPED.glob(f"*/{self.name}/config.json"))


def _head(
    name: str,
    prefix: str,
    help: str,
    layouts: dict[str, str] | None = None,
) -> Method:
    """A trained drafter of the package `drafters/name`, whose classes' names begin with `prefix`."""
    return Method(
        name,
        help,
        drafter=f"slipstream.drafters.{name}.model:{prefix}",
        objective=f"slipstream.drafters.{name}.objective:{prefix}Objective",
        recipe=f"slipstream.drafters.{name}.objective:{prefix}Recipe",
        layouts={layout: f"slipstream.interop.{home}" for layout, home in (layouts or {}).items()},
        tunes=True,
    )


TABLE = (
    Method(
        "auto",
        "whatever is quickest here, round by round: auto:head=DIR",
        make="slipstream.drafters.auto:Auto.named",
        tunes=True,
    ),
    Method("vanilla", "none: plain decoding", make="slipstream.drafters.vanilla:Vanilla"),
    Method("ngram", "repeats what followed the same words before", make="slipstream.drafters.ngram:NGram"),
    Method(
        "suffix",
        "a tree of all that followed the same words before",
        make="slipstream.drafters.suffix:Suffix",
    ),
    Method(
        "lookahead",
        "n-grams that the target's own passes make",
        make="slipstream.drafters.lookahead:Lookahead",
    ),
    Method(
        "hybrid",
        "a head and matches in one tree: hybrid:head=fasteagle",
        make="slipstream.drafters.hybrid:Hybrid.named",
    ),
    _head(
        "eagle",
        "Eagle",
        "guesses the target's next state",
        {"eagle": "layouts:EagleLayout", "eagle-sglang": "layouts:SGLangEagleLayout"},
    ),
    _head(
        "eagle3",
        "Eagle3",
        "guesses from three target states",
        {"eagle3": "layouts:Eagle3Layout", "speculators": "layouts:SpeculatorsLayout"},
    ),
    _head(
        "fasteagle",
        "FastEagle",
        "guesses several states in one pass",
        {"fasteagle-vllm": "fasteagle:FastEagleLayout"},
    ),
    _head(
        "medusa",
        "Medusa",
        "a small head for each token ahead",
        {"medusa": "layouts:MedusaLayout", "medusa-vllm": "layouts:VLLMMedusaLayout"},
    ),
    _head("bita", "Bita", "mask tokens in the target's own passes"),
    _head("glide", "Glide", "a decoder over the target's cache"),
    Method(
        "draft-model",
        "a smaller LM: draft-model:model=DIR",
        make="slipstream.drafters.draft_model.model:DraftModel.named",
        needs="model",
        drafter="slipstream.drafters.draft_model.model:DraftModel",
        objective="slipstream.drafters.draft_model.objective:DistillObjective",
        recipe="slipstream.drafters.draft_model.objective:DraftModelRecipe",
        tunes=True,
    ),
    Method(
        "self-speculative",
        "fewer of the target's blocks: self-speculative:skip=10-14",
        make="slipstream.drafters.draft_model.model:DraftModel.of_itself",
        tunes=True,
    ),
)


class Methods(UserDict[str, Method]):
    """Methods by name: those of `TABLE`, and those of installed packages, whose plugins are imported at the
    first look. A plugin that cannot be imported is named in the log, and left out."""

    def __init__(self) -> None:
        self.known = {method.name: method for method in TABLE}
        self.waiting = [*entry_points(group=PLUGINS)]

    @property
    def data(self) -> dict[str, Method]:  # type: ignore[override]
        while self.waiting:
            entry = self.waiting.pop()
            try:
                load_plugin(entry.value)
            except ValueError as error:
                package = entry.dist.name if entry.dist else "an installed package"
                logging.getLogger(__name__).warning("%s, of %s: its methods are left out", error, package)
        return self.known


METHODS = Methods()


def named() -> list[Method]:
    """The methods whose name alone makes a drafter, of some target at least."""
    return [method for method in METHODS.values() if method.make or method.shipped]


def register(method: Method) -> None:
    """Add a method to the table. Raises ValueError where its name is taken."""
    if method.name in METHODS:
        raise ValueError(f"there is a method {method.name!r} already: choose another name")
    METHODS[method.name] = method


def load_plugin(name: str) -> None:
    """Import a plugin, a module that calls `register`, once.

    Args:
        name: of a module that can be imported, or a Python file, whose directory is searched for modules
            from then on, as Python does for a script.

    Raises:
        ValueError: there is no such module, or it fails.
    """
    module, path = name, None
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        module = path.stem
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
    try:
        found = import_module(module)
    except Exception as error:
        hint = "" if path else f": name an installed module, or a file, such as .{os.sep}{name}.py"
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "there is none" + hint if missing else f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"plugin {name!r} cannot be imported: {reason}") from error
    if path and (other := getattr(found, "__file__", None)) != str(path):
        raise ValueError(
            f"plugin {name!r} cannot be imported: the module {module!r} is {other}: rename the file"
        )
