"""Modules that are private now, by the names that they had. They work until 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any


def forward(module: ModuleType, old_name: str, instead: str) -> Callable[[str], Any]:
    """Warns who imports the old name, and returns its ``__getattr__``: the module's attributes."""
    text = f"{old_name} is private and will be removed in 0.3. Try: {instead}"
    warnings.warn(text, FutureWarning, stacklevel=3)  # this function, the old module, its importer

    def attribute(name: str) -> Any:
        return getattr(module, name)

    return attribute
