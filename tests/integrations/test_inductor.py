"""torch.compile with inductor: slow, as it runs a C++ compiler; so in ranks of its own."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from cases import case
from test_collective_layers import assert_compiled, run_compiled

pytestmark = [pytest.mark.needs_native]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs g++")


@case(run_compiled, "inductor")
@pytest.mark.integration("torch", "torch.compile (inductor) of a function with collectives")
def test_compiled_with_inductor(values: list[Any]) -> None:
    assert_compiled(values)
