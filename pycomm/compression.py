"""The old name of a private module. It works until 0.3."""

from pycomm import _compression
from pycomm._old_names import forward

__getattr__ = forward(_compression, "pycomm.compression", "pycomm.comm_hooks.top_k")
