"""Medusa: a small head for each token ahead."""

from slipstream.drafters.medusa.model import Medusa, MedusaConfig, MedusaHead

__all__ = ["Medusa", "MedusaConfig", "MedusaHead"]
