"""FSDP2, tensor parallel, DTensor and checkpoints over device meshes, against one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh as _,  # noqa: F401
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import assert_close, batch_of, digest, loss_of, make_model, parameters_of, train_alone

pytestmark = pytest.mark.needs_native

STEPS = 5
LR = 0.05
# fp32, sums in another order: a few roundings of numbers below 4 in each of the steps.
EXACT = 2e-6
# bf16 has 8 bits: half a unit in the last place of parameters and gradients below 1, a step.
BF16 = STEPS * 2.0**-8
