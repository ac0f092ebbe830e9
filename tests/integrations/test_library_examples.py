"""The examples that need other libraries, as a user runs them: two ranks under torchrun."""

from __future__ import annotations

import re

import pytest
from documents import ROOT
from processes import run_python
from versions import require

EXAMPLES = ROOT / "examples"
PERCENT = r"test accuracy (8|9)\d\.\d%"
PRINTS = {
    "with_lightning.py": ("Lightning", PERCENT),
    "with_accelerate.py": ("Accelerate", f"backend pycomm, {PERCENT}"),
    "with_trainer.py": ("HF Trainer", f"backend pycomm, {PERCENT}"),
}


def test_each_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("with_*.py")} == set(PRINTS)


@pytest.mark.needs_native
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PRINTS)
def test_example_with_a_library(name: str) -> None:
    library, printed = PRINTS[name]
    require(library)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python([*launcher, str(EXAMPLES / name)], timeout_s=280.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(f"^{printed}$", done.stdout, re.M), done.stdout + done.stderr
