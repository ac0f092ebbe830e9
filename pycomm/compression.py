"""The old name of a private module. It works until 0.2."""

from __future__ import annotations

import warnings
from typing import Any

from pycomm import _compression

warnings.warn(
    "pycomm.compression is private and will be removed in 0.2. Try: pycomm.comm_hooks.top_k",
    FutureWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_compression, name)
