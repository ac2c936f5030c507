"""Whether the host may read a tensor's value to decide what to do next."""

from torch import Tensor


def is_host(x: Tensor) -> bool:
    """True on a CPU, where reading a value costs nothing. A GPU would have to finish first, and a graph that
    is being captured has no values yet."""
    return x.device.type == "cpu"
