"""The old name of a private module. It works until 0.2."""

from __future__ import annotations

import warnings
from typing import Any

from pycomm import _barrier

warnings.warn(
    "pycomm.barrier is private and will be removed in 0.2. Try: pycomm.monitored_barrier",
    FutureWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_barrier, name)
