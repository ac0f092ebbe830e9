"""TorchRec over pycomm. `make torchrec` runs these tests, in an environment of their own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from borrow import python_conftest

HERE = Path(__file__).resolve().parent
_shared = python_conftest(HERE)
no_process_left_behind = _shared.no_process_left_behind
no_pycomm_variables = _shared.no_pycomm_variables
pytest_addoption = _shared.pytest_addoption
pytest_collection_modifyitems = _shared.pytest_collection_modifyitems
pytest_unconfigure = _shared.pytest_unconfigure


def pytest_configure(config: pytest.Config) -> None:
    _shared.pytest_configure(config)
    try:
        importlib.import_module("torchrec")
    except ImportError as error:
        raise pytest.UsageError(f"{error}. Try: make torchrec, which installs TorchRec") from error
