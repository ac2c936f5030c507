"""The table of methods: one entry for each way to draft.

An entry names its parts as "module:Name" and imports them when they are used, so that the command line reads
this table without loading torch.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

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
    room: str = "methods",
) -> Method:
    """A trained drafter. Its classes' names begin with `prefix`, and `room` is its objective's module."""
    return Method(
        name,
        help,
        drafter=f"slipstream.drafters.{name}:{prefix}",
        objective=f"slipstream.training.{room}:{prefix}Objective",
        recipe=f"slipstream.training.recipes:{prefix}Recipe",
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
    _head("bita", "Bita", "mask tokens in the target's own passes", room="bita"),
    _head("glide", "Glide", "a decoder over the target's cache"),
    Method(
        "draft-model",
        "a smaller LM: draft-model:model=DIR",
        make="slipstream.drafters.draft_model:DraftModel.named",
        needs="model",
        drafter="slipstream.drafters.draft_model:DraftModel",
        objective="slipstream.training.methods:DistillObjective",
        recipe="slipstream.training.recipes:DraftModelRecipe",
        tunes=True,
    ),
    Method(
        "self-speculative",
        "fewer of the target's blocks: self-speculative:skip=10-14",
        make="slipstream.drafters.draft_model:DraftModel.of_itself",
        tunes=True,
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in TABLE}


def named() -> list[Method]:
    """The methods whose name alone makes a drafter, of some target at least."""
    return [method for method in METHODS.values() if method.make or method.shipped]


def register(method: Method) -> None:
    """Add a method to the table. Raises ValueError where its name is taken."""
    if method.name in METHODS:
        raise ValueError(f"there is a method {method.name!r} already: choose another name")
    METHODS[method.name] = method
