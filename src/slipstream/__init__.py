"""Slipstream makes a frozen LLM answer faster without changing one token of what it says."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter as Drafter
    from slipstream.core.drafter import State as State
    from slipstream.core.sampling import Sampler as Sampler
    from slipstream.core.sampling import Sampling as Sampling
    from slipstream.core.span import Span as Span
    from slipstream.core.target import Target as Target
    from slipstream.core.tree import PAD as PAD
    from slipstream.core.tree import Tree as Tree
    from slipstream.core.tree import chain as chain
    from slipstream.decode.generate import Generation as Generation
    from slipstream.decode.generate import Stream as Stream
    from slipstream.decode.generate import generate as generate
    from slipstream.decode.generate import stream as stream
    from slipstream.drafters import load_drafter as load_drafter
    from slipstream.drafters.ngram import NGram as NGram
    from slipstream.drafters.random_drafter import RandomDrafter as RandomDrafter
    from slipstream.drafters.spec import Spec as Spec
    from slipstream.drafters.tree_oracle import TreeOracle as TreeOracle
    from slipstream.drafters.vanilla import Vanilla as Vanilla
    from slipstream.interop.public import Conversion as Conversion
    from slipstream.interop.public import export as export
    from slipstream.interop.public import import_checkpoint as import_checkpoint
    from slipstream.measure.certify import Certificate as Certificate
    from slipstream.measure.certify import certify as certify
    from slipstream.measure.questions import Question as Question
    from slipstream.measure.report import BenchReport as BenchReport
    from slipstream.measure.run import bench as bench
    from slipstream.measure.tune import tune as tune
    from slipstream.measure.tuned import TuneReport as TuneReport
    from slipstream.methods import METHODS as METHODS
    from slipstream.methods import Method as Method
    from slipstream.methods import register as register
    from slipstream.targets import HFTarget as HFTarget
    from slipstream.targets import RecordedTarget as RecordedTarget
    from slipstream.targets import load_target as load_target
    from slipstream.training.run import TrainingRun as TrainingRun
    from slipstream.training.run import train as train
    from slipstream.training.synthesize import Answers as Answers
    from slipstream.training.synthesize import regenerate as regenerate
    from slipstream.training.synthesize import synthesize as synthesize

    __version__: str

_HOMES = {  # imported on first use: torch and transformers take seconds
    "core.drafter": "Drafter State",
    "core.sampling": "Sampler Sampling",
    "core.span": "Span",
    "core.target": "Target",
    "core.tree": "PAD Tree chain",
    "decode.generate": "Generation Stream generate stream",
    "drafters": "load_drafter",
    "drafters.ngram": "NGram",
    "drafters.random_drafter": "RandomDrafter",
    "drafters.spec": "Spec",
    "drafters.tree_oracle": "TreeOracle",
    "drafters.vanilla": "Vanilla",
    "interop.public": "Conversion export import_checkpoint",
    "measure.certify": "Certificate certify",
    "measure.questions": "Question",
    "measure.report": "BenchReport",
    "measure.run": "bench",
    "measure.tune": "tune",
    "measure.tuned": "TuneReport",
    "methods": "METHODS Method register",
    "targets": "HFTarget RecordedTarget load_target",
    "training.run": "TrainingRun train",
    "training.synthesize": "Answers regenerate synthesize",
}
_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = [*_OF]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name not in _OF:
        raise AttributeError(
            f"module 'slipstream' has no attribute {name!r}. Available: {', '.join(__all__)}"
        )
    return getattr(import_module(f"slipstream.{_OF[name]}"), name)
