"""TorchRec over pycomm. `make torchrec` runs these tests, in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PYTHON_TESTS = HERE.parent / "python"
for folder in (PYTHON_TESTS, HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
# Ranks import their targets by name.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# The options and promises of tests/python hold here, too.
_spec = importlib.util.spec_from_file_location("python_conftest", PYTHON_TESTS / "conftest.py")
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)

no_process_left_behind = _shared.no_process_left_behind
no_pycomm_variables = _shared.no_pycomm_variables
pytest_addoption = _shared.pytest_addoption
pytest_collection_modifyitems = _shared.pytest_collection_modifyitems
pytest_unconfigure = _shared.pytest_unconfigure


def pytest_configure(config: pytest.Config) -> None:
    _shared.pytest_configure(config)
    pytest.importorskip("torchrec", reason="make torchrec installs it", exc_type=ImportError)
