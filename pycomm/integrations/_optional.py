"""Loads libraries that are not pycomm's dependencies."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(module: str, *, package: str, needed_by: str) -> ModuleType:
    """Imports a module of a library that may be missing.

    Args:
        module: Its dotted name.
        package: What pip calls it.
        needed_by: What the user asked for, for the error.

    Raises:
        ImportError: The library is missing, or fails while it is imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Something that the library itself misses is another problem, with a text of its own.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f"{needed_by} needs {package}, which is not installed. Try: pip install {package}",
            name=error.name,
        ) from error
