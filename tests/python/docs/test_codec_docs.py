"""docs/codecs.md: its programs run, its table is the code's."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

import pytest
import torch.distributed as dist
from codec_bounds import BYTES_PER_BLOCK
from documents import blocks, read, table
from ranks import LOOPBACK, TORCH_DDP, free_port, run_ranks

from pycomm._settings import SETTINGS

pytestmark = pytest.mark.ci

DOCUMENT = "docs/codecs.md"
HEADER = (
    *("codec", "bytes per value"),
    *("one rounding of v, in a block whose largest value is m", "when"),
)


def run_document(rank: int, world_size: int) -> tuple[str, set[str]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks(read(DOCUMENT), "python"):
            exec(compile(block, DOCUMENT, "exec"), namespace)
    dist.destroy_process_group()
    return printed.getvalue(), set(namespace["state"])


@pytest.mark.needs_native
def test_the_programs_run_one_after_the_other() -> None:
    for printed, saved in run_ranks(
        2,
        run_document,
        init="none",
        env={"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())},
        destroy=False,
        preload=TORCH_DDP,
    ).values():
        sent, nbytes = map(int, re.findall(r"elements_sent=(\d+), bytes_sent=(\d+)", printed)[0])
        assert abs(sent - 1_000_000) < 256  # this rank's slice and its values for the other's
        assert nbytes / sent < 1.01
        assert saved == {"weight", "bias"}


def test_the_table_is_the_codes() -> None:
    (setting,) = (setting for setting in SETTINGS if setting.field == "wire_dtype")
    rows = {row[0].strip("`"): row[1] for row in table(read(DOCUMENT), *HEADER)}
    for codec, nbytes in rows.items():
        assert setting.parse("a test", codec) == codec
        assert float(nbytes) == round(BYTES_PER_BLOCK.get(codec, 1024) / 256, 3)
    assert set(rows) == {"fp32", *BYTES_PER_BLOCK}


def test_the_least_size_is_the_codes() -> None:
    assert "of 16 KiB or more" in " ".join(read(DOCUMENT).split())
    assert "kMinEncodedNbytes = 16 << 10" in read("csrc/schedule/select.h")
    assert "kCodecBlock = 256" in read("csrc/base/codec.h")
