"""Slipstream makes a frozen LLM answer faster without changing one token of what it says."""

import ast
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.catalog import fetch as fetch
    from slipstream.core.drafter import Drafter as Drafter, State as State
    from slipstream.core.grammar import GrammarLimits as GrammarLimits
    from slipstream.core.sampling import Sampler as Sampler, Sampling as Sampling
    from slipstream.core.span import Span as Span
    from slipstream.core.target import Target as Target
    from slipstream.core.tree import PAD as PAD, Tree as Tree, chain as chain
    from slipstream.drafters import load_drafter as load_drafter
    from slipstream.drafters.random_drafter import RandomDrafter as RandomDrafter
    from slipstream.drafters.suffix import NGram as NGram
    from slipstream.drafters.tree_oracle import TreeOracle as TreeOracle
    from slipstream.drafters.vanilla import Vanilla as Vanilla
    from slipstream.engine.generate import (
        Generation as Generation,
        Interrupted as Interrupted,
        Stream as Stream,
        generate as generate,
        stream as stream,
    )
    from slipstream.interop.hugging_face import custom_generate as custom_generate
    from slipstream.interop.parity import ParityReport as ParityReport, parity as parity
    from slipstream.interop.public import (
        Conversion as Conversion,
        export as export,
        import_checkpoint as import_checkpoint,
    )
    from slipstream.measure.bench import bench as bench, sweep as sweep
    from slipstream.measure.certify import certify as certify
    from slipstream.measure.datasets import Question as Question
    from slipstream.measure.doctor.doctor import DoctorReport as DoctorReport, doctor as doctor
    from slipstream.measure.papers.reproduce import reproduce as reproduce
    from slipstream.measure.papers.reproduce_report import ReproduceReport as ReproduceReport
    from slipstream.measure.results import (
        BenchReport as BenchReport,
        Certificate as Certificate,
        Sweep as Sweep,
    )
    from slipstream.measure.tune import tune as tune
    from slipstream.measure.tune_report import TuneReport as TuneReport
    from slipstream.methods import METHODS as METHODS, Method as Method, register as register
    from slipstream.spec import Spec as Spec
    from slipstream.targets.hf import HFTarget as HFTarget
    from slipstream.targets.load import load_target as load_target
    from slipstream.targets.recorded import RecordedTarget as RecordedTarget
    from slipstream.training.inventory import Inventory as Inventory, inventory as inventory
    from slipstream.training.run import TrainingRun as TrainingRun, train as train
    from slipstream.training.synthesize import (
        Answers as Answers,
        regenerate as regenerate,
        synthesize as synthesize,
    )

    __version__: str

# How long torch's idle threads keep others off their cores: a thirtieth of the default. It costs nothing
# where nobody else wants them.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# The block above lists the public names. They are imported on first use: torch takes seconds.
_HOMES = {
    name.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8")))
    if isinstance(node, ast.ImportFrom)
    for name in node.names
    if name.name == name.asname
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'slipstream' has no attribute {name!r}. Available: {', '.join(__all__)}"
        )
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What a shell offers behind `slipstream.`: the public names alone."""
    return [*__all__, "__version__"]
