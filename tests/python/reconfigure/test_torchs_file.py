"""How torch's own file of reconfigure is made to run over pycomm; it needs torch 2.14 to run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "torch_suite" / "fault_tolerance.py"
AS_TUPLES = """\
FAULT_TOLERANCE_BACKENDS = [
    ("gloo", "cpu"),
    ("nccl2", "cuda"),
]


def test(self):
    is_nccl = self.backend_name == "nccl2"
"""


def over_pycomm(source: str) -> str:
    spec = importlib.util.spec_from_file_location("fault_tolerance", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("fault_tolerance", None)
    return str(module.over_pycomm(source))


@pytest.mark.parametrize("entry", ["", "Backend"])
def test_its_list_of_backends_becomes_pycomm(entry: str) -> None:
    source = over_pycomm(AS_TUPLES.replace("    (", f"    {entry}("))
    assert f'    {entry}("pycomm", "cpu"),\n]' in source
    assert "gloo" not in source and "is_nccl = True" in source


def test_a_file_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no list"):
        over_pycomm("print()")
    with pytest.raises(ValueError, match=r"abort\(\)"):
        over_pycomm(AS_TUPLES.replace('nccl2"\n', 'other"\n'))
