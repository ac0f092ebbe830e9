"""The private names of torch that the package calls and overrides, in this torch."""

from __future__ import annotations

import inspect
from datetime import timedelta

from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm


def test_a_group_can_be_made_under_a_name_of_ours() -> None:
    inspect.signature(distributed_c10d._new_process_group_helper).bind(
        2,
        0,
        [0, 1],
        "pycomm",
        None,
        "0_host0_1",
        backend_options=None,
        timeout=timedelta(seconds=1),
        device_id=None,
    )
    for name in ("pg_map", "pg_group_ranks"):
        assert hasattr(distributed_c10d._World, name)


def test_ddp_has_what_the_wrapper_overrides_and_calls() -> None:
    inspect.signature(DistributedDataParallel._assign_modules_buffers).bind(None)
    ours = pycomm.DistributedDataParallel
    shared = [
        name
        for name, each in vars(ours).items()
        if name.startswith("_") and not name.startswith("__") and callable(each)
        if hasattr(DistributedDataParallel, name)
    ]
    for name in shared:
        theirs = inspect.signature(getattr(DistributedDataParallel, name)).parameters
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(theirs), name
