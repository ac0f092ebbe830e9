"""The old name of a private module. It works until 0.2."""

from __future__ import annotations

import warnings
from typing import Any

from pycomm import _backend

warnings.warn(
    "pycomm.backend is private and will be removed in 0.2. Try: the names of pycomm itself, such "
    "as pycomm.last_error()",
    FutureWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_backend, name)
