"""TorchRec over pycomm. `make torchrec` runs these tests, in an environment of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from borrow import python_conftest  # noqa: E402

_shared = python_conftest(HERE)
no_process_left_behind = _shared.no_process_left_behind
no_pycomm_variables = _shared.no_pycomm_variables
pytest_addoption = _shared.pytest_addoption
pytest_collection_modifyitems = _shared.pytest_collection_modifyitems
pytest_unconfigure = _shared.pytest_unconfigure


def pytest_configure(config: pytest.Config) -> None:
    _shared.pytest_configure(config)
    pytest.importorskip("torchrec", reason="make torchrec installs it", exc_type=ImportError)
