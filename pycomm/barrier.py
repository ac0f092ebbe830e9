"""The old name of a private module. It works until 0.3."""

from pycomm import _barrier
from pycomm._old_names import forward

__getattr__ = forward(_barrier, "pycomm.barrier", "pycomm.monitored_barrier")
