"""BiTA: mask tokens in the target's own passes."""

from slipstream.drafters.bita.model import Bita, BitaConfig, BitaHead

__all__ = ["Bita", "BitaConfig", "BitaHead"]
