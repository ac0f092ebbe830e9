"""For a conftest.py beside tests/python whose tests use the rig."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

CONFTEST = Path(__file__).resolve().parents[1] / "python" / "conftest.py"


def python_conftest(here: Path) -> ModuleType:
    """Lets the tests of a folder, and their ranks, import its modules.

    Returns the conftest.py of tests/python, whose options and promises hold here, too.
    """
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    # Ranks import their targets by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    spec = importlib.util.spec_from_file_location("python_conftest", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
