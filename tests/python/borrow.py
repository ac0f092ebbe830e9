"""For a conftest.py beside tests/python whose tests use the rig there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

PYTHON_TESTS = Path(__file__).resolve().parent


def python_conftest(here: Path) -> ModuleType:
    """Lets the tests of a folder, and their ranks, import its modules and those of tests/python.

    Returns the conftest.py of tests/python, whose options and promises hold here, too.
    """
    for folder in (PYTHON_TESTS, here):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    # Ranks import their targets by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    spec = importlib.util.spec_from_file_location("python_conftest", PYTHON_TESTS / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
