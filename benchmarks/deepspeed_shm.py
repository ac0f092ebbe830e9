"""DeepSpeed's all_reduce through shared memory beside the backends: `--backends pycomm,deepspeed`.

Its operation is called in the same processes, on fp32 sums of ranks on one host. `pip install
deepspeed` in the environment that measures; the first run compiles the operation.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from collective import CollectiveCase
from harness import Place
from whole_sum import AllReduce, refuse_all_but_sums
from world import World

NAME = "deepspeed"


def build() -> str:
    """Compile the operation where that has not been done, and return DeepSpeed's version."""
    _load()
    return importlib.metadata.version("deepspeed")


def _load() -> Any:
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
    except ImportError as error:
        raise SystemExit(f"deepspeed is not there: pip install deepspeed ({error})") from error
    return builders.ShareMemCommBuilder().load(verbose=False)


class _DeepSpeedAllReduce(AllReduce):
    def __init__(self, world: World) -> None:
        os.environ["LOCAL_SIZE"] = str(world.ranks)  # it takes this to mean: all on one host
        _load().initialize(world.ranks, world.rank)
        world.barrier()  # all have opened it; it would leave its memory behind
        place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
        name = f"deepspeed_allreduce_buffer_{place}_{world.rank}"
        Path("/dev/shm", name).unlink(missing_ok=True)
        self._all_reduce: Callable[[torch.Tensor], object] = (
            torch.ops.deepspeed.inference_all_reduce_
        )

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        self._all_reduce(output)


def prepare(world: World, place: Place, workload: str) -> CollectiveCase:
    """This rank's part at one size."""
    refuse_all_but_sums(NAME, place, workload)
    if NAME not in world.kept:
        world.kept[NAME] = _DeepSpeedAllReduce(world)
    rival = world.kept[NAME]
    assert isinstance(rival, _DeepSpeedAllReduce)
    return rival.prepare(place)
