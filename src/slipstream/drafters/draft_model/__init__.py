"""A smaller model, or some of the target's own blocks."""

from slipstream.drafters.draft_model.model import DraftModel, LayerSubset

__all__ = ["DraftModel", "LayerSubset"]
