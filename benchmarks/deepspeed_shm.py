"""DeepSpeed's all_reduce through shared memory beside the backends: `--backends pycomm,deepspeed`.

Its operation is called in the same processes, on fp32 sums of ranks on one host. `pip install
deepspeed` in the environment that measures; the first run compiles the operation.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from collective import Collective, CollectiveCase, Segment
from exact import reduced_pattern
from harness import Place
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


class _DeepSpeedAllReduce(Collective):
    name = "all_reduce"

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

    def bus_factor(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        self._all_reduce(output)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        yield Segment(0, numel, reduced_pattern(seed, place.ranks, place.redop))


def prepare(world: World, place: Place, workload: str) -> CollectiveCase:
    """This rank's part at one size."""
    if workload != "all_reduce" or place.dtype != torch.float32 or place.redop != "sum":
        raise SystemExit(f"{NAME} is measured with all_reduce, float32 and sum only")
    if NAME not in world.kept:
        world.kept[NAME] = _DeepSpeedAllReduce(world)
    rival = world.kept[NAME]
    assert isinstance(rival, _DeepSpeedAllReduce)
    return rival.prepare(place)
