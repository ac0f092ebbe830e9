"""A signal handler or a hook asks the wrapper something while its backward pass waits; and it does
not wait where it only asks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from signals import interrupt_main_thread
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import pycomm

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


def made(**options: Any) -> Any:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return pycomm.DistributedDataParallel(layers, bucket_cap_mb=0.00005, **options)


def backward(model: Any, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    return [param.grad.clone() for param in model.parameters()]


def ask(model: Any) -> Any:
    logged = model._get_ddp_logging_data()
    stats = model.stats()
    model.communication_state_dict()
    assert int(logged["num_buckets"]) > 1
    return stats


def signal_rank_0(rank: int, model: Any, handler: Callable[..., None]) -> None:
    """The main thread of rank 0 gets a signal once it waits in the model's next backward pass, for
    rank 1, which waits here until the handler has set "handled" in the store."""
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["handled"])
        return
    signal.signal(signal.SIGUSR1, handler)
    begun = threading.Event()
    next(model.parameters()).register_hook(lambda _: begun.set())
    interrupt_main_thread(signal.SIGUSR1, begun)


def a_signal_comes_while_backward_waits(rank: int, world_size: int) -> None:
    """Rank 1 begins its backward pass only when rank 0's handler has ended."""
    store = dist.distributed_c10d._get_default_store()
    model = made()
    backward(model, rank)
    want = backward(model, rank)  # its forward pass has agreed on the order of the buckets
    asked: list[Any] = []
    refused: list[str] = []

    def handler(*_: object) -> None:
        asked.append(ask(model))
        try:
            model.load_communication_state_dict({"accumulated": 0, "unsynced": 0})
        except RuntimeError as error:
            refused.append(str(error))
        store.set("handled", "yes")

    signal_rank_0(rank, model, handler)
    assert all(map(torch.equal, backward(model, rank), want))
    if rank == 0:
        assert (asked[0].passes, asked[0].steps) == (3, 2)
        assert "on the thread that runs its backward pass" in refused[0]
    assert model.stats().steps == 3


def a_state_is_taken_while_backward_waits(rank: int, world_size: int, **options: Any) -> None:
    """It has no residuals, which the pass writes; the rest is as before the pass."""
    store = dist.distributed_c10d._get_default_store()
    layer = nn.Linear(80, 80, bias=False)
    model = pycomm.DistributedDataParallel(layer, wire_dtype="int8", **options)

    def train() -> None:
        model(torch.randn(2, 80)).square().sum().backward()

    for _ in range(2):
        train()
    before = model.communication_state_dict()
    assert before.pop("residuals")["weight"].any()
    taken: list[Any] = []

    def handler(*_: object) -> None:
        taken.append(model.communication_state_dict())
        store.set("handled", "yes")

    signal_rank_0(rank, model, handler)
    train()
    if "weighed" in before:  # the times of a rank go on between passes
        for state in (before, *taken):
            state["weighed"] = state["weighed"][:6]
    assert rank == 1 or taken == [before]
    assert "residuals" in model.communication_state_dict()


def a_weighed_state_is_taken_while_backward_waits(rank: int, world_size: int) -> None:
    a_state_is_taken_while_backward_waits(rank, world_size, weight="samples")


def encoded_layer() -> Any:
    return pycomm.DistributedDataParallel(nn.Linear(80, 80, bias=False), wire_dtype="int8")


def a_state_is_taken_while_a_rank_without_data_waits(rank: int, world_size: int) -> None:
    """Rank 0 begins its second backward pass only when a thread of rank 1 has the state."""
    store = dist.distributed_c10d._get_default_store()
    model = encoded_layer()

    def take() -> None:
        while "residuals" in model.communication_state_dict():
            time.sleep(0.001)
        store.set("taken", "yes")

    taker = threading.Thread(target=take, daemon=True)
    with model.join():
        for step in range(2 - rank):
            loss = model(torch.randn(2, 80)).square().sum()
            if step == 1:
                store.wait(["taken"])
            loss.backward()
        if rank == 1:
            assert "residuals" in model.communication_state_dict()
            taker.start()
    if rank == 1:
        taker.join()
    assert "residuals" in model.communication_state_dict()


def a_state_is_taken_after_a_rank_without_data_has_failed(rank: int, world_size: int) -> None:
    """What its failed all-reduce has left is no residual."""
    model = encoded_layer()
    with pytest.raises(pycomm.errors.CollectiveMismatchError), model.join():
        for step in range(2 - rank):
            loss = model(torch.randn(2, 80)).square().sum()
            if step == 1:
                dist.all_reduce(torch.ones(3))
            loss.backward()
        assert "residuals" in model.communication_state_dict()
    assert rank == 0 or "residuals" not in model.communication_state_dict()
    model.reducer._reset_state()
    assert not model.communication_state_dict()["residuals"]["weight"].any()


def register_asking_hook(model: Any) -> tuple[list[Any], list[str]]:
    """A hook that asks, and is refused a load: what it gets of both."""
    asked: list[Any] = []
    refused: list[str] = []

    def hook(state: None, bucket: Any) -> Any:
        asked.append(ask(model))
        try:
            model.load_communication_state_dict({"accumulated": 0, "unsynced": 0})
        except RuntimeError as error:
            refused.append(str(error))
        return default_hooks.allreduce_hook(state, bucket)

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    return asked, refused


def a_hook_asks_while_a_rank_without_data_waits(rank: int, world_size: int) -> None:
    model = made()
    _, refused = register_asking_hook(model)
    with model.join():
        for _ in range(1 - rank):
            backward(model, rank)
    assert len(refused) == int(model._get_ddp_logging_data()["num_buckets"])


def a_hook_asks(rank: int, world_size: int) -> None:
    want = backward(made(), rank)
    model = made()
    asked, refused = register_asking_hook(model)
    assert all(map(torch.equal, backward(model, rank), want))
    assert len(asked) > 1 and asked[0].passes == 1 and asked[0].steps == 0
    assert len(refused) == len(asked)
    for (
        text
    ) in refused:  # as the hook's thread finds the pass: in a launch, or between two gradients
        assert "comm hook" in text or "in the middle of a backward pass" in text


# Of the native reducer, as csrc/ddp/reducer.h has them: what each call does in a signal handler of
# the thread whose pass waits.
SHOWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stats", "last_step", "bucket_names", "members", "leads"), ()),
    **dict.fromkeys(("exponents", "order", "pending_weight", "weighed", "weight_unsynced"), ()),
    **dict.fromkeys(("last_compute_ns", "weighed_steps", "passes", "is_counting", "has_left"), ()),
}
EMPTY = ("residuals", "used_here")
NO_STATE = (
    "set_logger",
    "ask_to_leave",
    "ran_forward",
    "_push_all_rebuilt_params",
    "_set_ddp_runtime_logging_sample_rate",
)
UNSUPPORTED = (
    "_autograd_hook",
    "_set_mixed_precision_param_dtype",
    "_set_optimizer_in_backward",
    "_run_allreduce_hook",
    "_get_zeros_like_grad_buckets",
    "_run_comm_hook",
    "_get_local_used_map",
    "_set_sparse_metadata",
)


def refused_calls(work: Any, reducer: Any) -> dict[str, tuple[Any, ...]]:
    plain = "prepare_for_forward check_hook_may_be_set _rebuild_buckets "
    plain += "_set_static_graph _delay_all_reduce _remove_autograd_hooks "
    plain += "_check_reducer_finalized _reset_state is_within_backward forward_failed"
    return {
        **dict.fromkeys(plain.split(), ()),
        "forward_began": (1.0,),
        "mark_forward": ([], True, 1.0),
        "set_weight": (1.0,),
        "set_weight_unsynced": (1.0,),
        "set_largest": (1,),
        "pass_without_batch": ([(reducer, True)],),
        "step_rows": (0,),
        "prepare_for_backward": ([],),
        "_set_forward_pass_work_handle": (work, False),
        "shadow_backward": (True,),
        "_install_post_backward_futures": ([],),
        "record_steps": (True,),
        "load": ({}, [], False, 0, [], {}, None, 0.0),
        "scale_residuals": (1.0,),
        "_register_comm_hook": (None, default_hooks.allreduce_hook),
        "_register_builtin_comm_hook": (dist.BuiltinCommHookType.FP16_COMPRESS,),  # type: ignore[attr-defined]
        "_update_process_group": (dist.group.WORLD,),
        "share_store": (dist.distributed_c10d._get_default_store(),),
        "set_buffers": ([],),
        "follow_members": (3,),
        "sum_of_members": (torch.zeros(0, dtype=torch.float64), "nothing"),
        "await_newcomers": (),
        "join_point": (),
        "explain_forward": ("text",),
    }


def each_method_in_a_handler(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    model = made(weight="samples", wire_dtype="int8", find_unused_parameters=True)
    backward(model, rank)
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    refused = refused_calls(work, model.reducer)
    reducer = model.reducer
    ours = (name for name in vars(type(reducer)) if not name.startswith(("__", "_pybind11")))
    methods = {*ours}
    methods = {name for name in methods if callable(getattr(reducer, name))}
    assert methods == {*SHOWN, *EMPTY, *NO_STATE, *UNSUPPORTED, *refused}, "not in the table"
    wrong: list[str] = []

    def handler(*_: object) -> None:
        for name, args in SHOWN.items():
            try:
                getattr(reducer, name)(*args)
            except Exception as error:
                wrong.append(f"{name}: {error}")
        wrong.extend(f"{name}: not empty" for name in EMPTY if getattr(reducer, name)())
        for name, args in refused.items():
            try:
                getattr(reducer, name)(*args)
                wrong.append(f"{name}: it was done")
            except RuntimeError as error:
                if "on the thread that runs its backward pass" not in str(error):
                    wrong.append(f"{name}: {error}")
        store.set("handled", "yes")

    signal_rank_0(rank, model, handler)
    backward(model, rank)
    assert not wrong, wrong


@pytest.mark.parametrize(
    "program",
    [
        a_signal_comes_while_backward_waits,
        a_state_is_taken_while_backward_waits,
        a_weighed_state_is_taken_while_backward_waits,
        a_state_is_taken_while_a_rank_without_data_waits,
        a_state_is_taken_after_a_rank_without_data_has_failed,
        a_hook_asks,
        a_hook_asks_while_a_rank_without_data_waits,
        each_method_in_a_handler,
    ],
)
def test_the_wrapper_is_asked(program: Any) -> None:
    run_ranks(2, program, timeout_s=60)


def beside_a_busy_loop(rank: int, size: int, store_at: str) -> float | None:
    """Rank 0's data loop stands still with the first bucket, until the third layer's turn comes."""
    fault_ranks.use_fault_build()
    options: dict[str, Any] = {"pg_options": pycomm.Options(transport="tcp")}
    dist.init_process_group("pycomm", init_method=store_at, rank=rank, world_size=size, **options)
    from pycomm._native import loader

    native: Any = loader.load()
    store = dist.distributed_c10d._get_default_store()
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model = pycomm.DistributedDataParallel(layers, bucket_cap_mb=0.01)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    waited_s: list[float] = []

    def hold(_: torch.Tensor) -> None:  # the last layer's bucket is on its way
        native.arm_fault_points("frame.header:1:hold")
        store.set("armed", "")
        while not native.fault_points()[0][2]:
            time.sleep(0.001)
        waited_s.append(-time.monotonic())

    def let_go(_: torch.Tensor) -> None:  # the second layer's gradients have come
        waited_s[0] += time.monotonic()
        native.arm_fault_points("")

    def before(layer: int, hook: Callable[[torch.Tensor], Any]) -> None:
        layers[layer].register_forward_hook(lambda _, __, output: hooked(output, hook))

    def hooked(output: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        output.register_hook(hook)

    if rank == 0:
        before(1, hold)
        before(0, let_go)
    else:
        before(2, lambda _: store.wait(["armed"]))
    model(torch.ones(2, 64)).sum().backward()
    dist.barrier()
    return waited_s[0] if rank == 0 else None


@pytest.mark.faults
@pytest.mark.usefixtures("fault_build")
def test_a_look_at_the_first_bucket_waits_for_no_thread(tmp_path: Path) -> None:
    args = (f"file://{tmp_path}/store",)
    found = run_ranks(2, beside_a_busy_loop, args=args, init="none", timeout_s=150).values()
    assert found[0] < 30  # the loop stands still for 60 s unless it is let go
