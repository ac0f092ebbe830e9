"""The old name of a private module. It works until 0.3."""

from pycomm import _backend
from pycomm._old_names import forward

_INSTEAD = "the names of pycomm itself, such as pycomm.last_error()"

__getattr__ = forward(_backend, "pycomm.backend", _INSTEAD)
