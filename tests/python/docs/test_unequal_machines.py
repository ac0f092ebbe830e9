"""docs/unequal-machines.md: its programs run as they are written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from documents import blocks, read, run_by_torchrun

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

LOOP = "for epoch in range(3):\n"


def run(folder: Path, program: str) -> str:
    (folder / "train.py").write_text(program)
    done = run_by_torchrun(folder, "--nproc-per-node=2", "train.py")
    return done.stdout + done.stderr


def test_the_first_program_trains(tmp_path: Path) -> None:
    program = blocks(read("docs/unequal-machines.md"), "python")[0]
    output = run(tmp_path, program)
    (found,) = re.findall(r"^shares \((\d+), (\d+)\)$", output, re.MULTILINE)
    assert sum(map(int, found)) == 256
    assert "of the shape [128, 32]" in output  # how the first batch was counted


def test_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    program, *others = blocks(read("docs/unequal-machines.md"), "python")
    save, load = (
        block for block in others if "sampler.state_dict" in block or "torch.load" in block
    )
    made, _, loop = program.partition(LOOP)
    saves = "if sampler.stats().cursor == 5:\n" + textwrap.indent(f"{save}break\n", " " * 4)
    loop = loop.partition("if torch")[0] + textwrap.indent(saves, " " * 8)
    _, _, made_again = made.partition('init_process_group("pycomm")\n')
    shows = "print(end=f'resumed {first_epoch} {sampler.stats().cursor}\\n')\n"
    whole = made + "epoch = 1\nfor _ in (1,):\n" + loop + made_again + load + shows
    output = run(tmp_path, whole + "torch.distributed.destroy_process_group()\n")
    assert output.count("resumed 1 5\n") == 2, output
