"""The private names of torch that the package calls and overrides, in this torch."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta

from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.ddp.between_steps import BetweenSteps


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


CALLED = ("_assign_modules_buffers", "_check_sync_bufs_post_fwd")
OVERRIDDEN = {
    "__getstate__",
    "_build_params_for_reducer",
    "_check_comm_hook",
    "_ddp_init_helper",
    "_inside_ddp_forward",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_post_forward",
    "_pre_forward",
    "_register_buffer_comm_hook",
    "_register_builtin_comm_hook",
    "_sync_buffers",
    "_update_process_group",
    "join",
    "register_comm_hook",
}
NEWER = {"finalize_backward", "require_manual_backward_finalization"}
"""Since torch 2.15."""


def test_ddp_has_what_the_wrapper_overrides_and_calls() -> None:
    for name in CALLED:
        inspect.signature(getattr(DistributedDataParallel, name)).bind(None)
    inspect.signature(DistributedDataParallel._passing_sync_batchnorm_handle).bind(None, None)
    ours = pycomm.DistributedDataParallel
    classes = ours.__mro__[: ours.__mro__.index(DistributedDataParallel)]
    made = {name for each in classes for name in vars(each) if not re.match("__|_abc_", name)}
    made = {"__getstate__", *made} - NEWER
    theirs = vars(DistributedDataParallel)
    assert theirs.keys() >= OVERRIDDEN, "torch's class has it no more, or under another name"
    assert {name for name in made if hasattr(DistributedDataParallel, name)} == OVERRIDDEN
    for name in OVERRIDDEN:
        both = (getattr(each, name) for each in (ours, DistributedDataParallel))
        mine, wanted = ([*inspect.signature(each).parameters] for each in both)
        if mine[-2:] == ["args", "options"]:  # passed on
            mine, wanted = mine[:-2], wanted[: len(mine) - 2]
        assert mine == wanted, name


def test_torch_marks_the_pass_of_a_static_graph_where_the_wrapper_reads_it() -> None:
    name = "_static_graph_delay_allreduce_enqueued"  # of objects only
    assert name in vars(BetweenSteps)
    sets, asks = DistributedDataParallel._set_static_graph, DistributedDataParallel._post_forward
    assert name in sets.__code__.co_names and name in asks.__code__.co_names
