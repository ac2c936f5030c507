"""The table of methods: one entry for each way to draft.

An entry names its parts as "module:Name" and imports them when they are used, so that the command line reads
this table without loading torch.
"""

import logging
import os
import sys
from collections import UserDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

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

    def makes(self, options: Collection[str]) -> bool:
        """Whether `make` makes the drafter of a spec with these options."""
        return self.make is not None and (self.needs is None or self.needs in options)

    @property
    def shipped(self) -> list[str]:
        """The targets that weights ship for."""
        return sorted(home.parts[-3] for home in SHIPPED.glob(f"*/{self.name}/config.json"))


def _method(name: str, help: str, make: str | None = None, **parts: Any) -> Method:
    """A method of our own, whose `make` is in the room of drafters."""
    return Method(name, help, make and f"slipstream.drafters.{make}", **parts)


def _trained(name: str, help: str, classes: str, layouts: Mapping[str, str] = {}, **parts: Any) -> Method:
    """A trained method, whose `classes` are a folder and what the names of the classes there begin with."""
    folder, prefix = classes.split(":")
    model, objective = (f"slipstream.drafters.{folder}.{file}:{prefix}" for file in ("model", "objective"))
    parts |= {"drafter": model, "objective": f"{objective}Objective", "recipe": f"{objective}Recipe"}
    parts["layouts"] = {key: f"slipstream.interop.layouts:{layout}" for key, layout in layouts.items()}
    return _method(name, help, **parts, tunes=True)


_AUTO = "whatever is quickest here, round by round: auto:head=DIR"
_SELF = "fewer of the target's blocks: self-speculative:skip=10-14"
_EAGLE = {"eagle": "EagleLayout", "eagle-sglang": "SGLangEagleLayout"}
_EAGLE3 = {"eagle3": "Eagle3Layout", "speculators": "SpeculatorsLayout"}
_FASTEAGLE = {"fasteagle-vllm": "FastEagleLayout"}
_MEDUSA = {"medusa": "MedusaLayout", "medusa-vllm": "VLLMMedusaLayout"}
_MODEL: dict[str, Any] = {"make": "draft_model.model:DraftModel.named", "needs": "model"}

TABLE = (
    _method("auto", _AUTO, "auto:Auto.named", tunes=True),
    _method("vanilla", "none: plain decoding", "vanilla:Vanilla"),
    _method("ngram", "repeats what followed the same words before", "suffix:NGram"),
    _method("suffix", "a tree of all that followed the same words before", "suffix:Suffix"),
    _method("lookahead", "n-grams that the target's own passes make", "lookahead:Lookahead"),
    _method("hybrid", "a head and matches in one tree: hybrid:head=fasteagle", "hybrid:Hybrid.named"),
    _trained("eagle", "guesses the target's next state", "eagle:Eagle", _EAGLE),
    _trained("eagle3", "guesses from three target states", "eagle3:Eagle3", _EAGLE3),
    _trained("fasteagle", "guesses several states in one pass", "fasteagle:FastEagle", _FASTEAGLE),
    _trained("medusa", "a small head for each token ahead", "medusa:Medusa", _MEDUSA),
    _trained("bita", "mask tokens in the target's own passes", "bita:Bita"),
    _trained("glide", "a decoder over the target's cache", "glide:Glide"),
    _trained("draft-model", "a smaller LM: draft-model:model=DIR", "draft_model:DraftModel", **_MODEL),
    _method("self-speculative", _SELF, "draft_model.model:DraftModel.of_itself", tunes=True),
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
        loaded = import_module(module)
    except Exception as error:
        hint = "" if path else f": name an installed module, or a file, such as .{os.sep}{name}.py"
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "there is none" + hint if missing else f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"plugin {name!r} cannot be imported: {reason}") from error
    if path and (other := getattr(loaded, "__file__", None)) != str(path):
        raise ValueError(
            f"plugin {name!r} cannot be imported: the module {module!r} is {other}: rename the file"
        )
