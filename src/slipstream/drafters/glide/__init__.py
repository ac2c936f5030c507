"""GLIDE: a decoder over the target's cache."""

from slipstream.drafters.glide.model import Glide, GlideConfig, GlideHead

__all__ = ["Glide", "GlideConfig", "GlideHead"]
