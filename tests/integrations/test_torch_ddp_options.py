"""torch's own DistributedDataParallel: join, hooks, static graph, ZeRO, against one process.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PRELOAD, case
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import (
    assert_close,
    batch_of,
    digest,
    loss_of,
    make_model,
    parameters_of,
    train_alone,
)

from pycomm.comm_hooks import ordered

pytestmark = [pytest.mark.needs_native, pytest.mark.nightly]

STEPS = 6
LR = 0.05
# fp32 sums in another order: six steps of at most a few roundings of numbers near 1.
EXACT = 2e-6

Values = list[dict[str, torch.Tensor]]


def train(model: nn.Module, optimizer: Any, rank: int, world_size: int, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(step, rank, world_size)).backward()
        optimizer.step()


def assert_same_on_all_ranks(values: Values) -> None:
    digests = {digest(value.values()) for value in values}
    assert len(digests) == 1, "ranks differ"


def small_buckets(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(make_model(), bucket_cap_mb=0.005, **options)


# Options


def train_with_options(rank: int, world_size: int, option: str) -> Any:
    model = small_buckets(**{option: True})
    train(model, torch.optim.SGD(model.parameters(), lr=LR), rank, world_size)
    return parameters_of(model.module)


OPTIONS = ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"]


@pytest.mark.parametrize(
    "option",
    [pytest.param(name, marks=case(train_with_options, name)) for name in OPTIONS],
)
@pytest.mark.integration("torch", "DistributedDataParallel, equal to one process")
def test_ddp_option(option: str, values: Values) -> None:
    assert_same_on_all_ranks(values)
    assert_close(values[0], parameters_of(train_alone(STEPS, LR)[1]), EXACT)


# Uneven inputs


def join_uneven_inputs(rank: int, world_size: int) -> Any:
    model = small_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    taken = 0
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, batch_of(step, rank, world_size)).backward()
            optimizer.step()
            taken += 1
    return taken, parameters_of(model.module)


@case(join_uneven_inputs)
@pytest.mark.integration("torch", "DDP join: uneven inputs, equal to one process")
def test_join(values: list[Any]) -> None:
    assert [taken for taken, _ in values] == [3, 5]
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for step in range(5):  # from the fourth step on rank 1 has its half of the batch to itself
        optimizer.zero_grad()
        loss_of(alone, batch_of(step) if step < 3 else batch_of(step, 1, 2)).backward()
        optimizer.step()
    assert_same_on_all_ranks([parameters for _, parameters in values])
    assert_close(values[0][1], parameters_of(alone), EXACT)


def join_with_zero(rank: int, world_size: int) -> Any:
    model = small_buckets()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    with Join([model, optimizer]):
        for step in range(3 + rank):
            optimizer.zero_grad()
            loss_of(model, batch_of(step, rank, world_size)).backward()
            optimizer.step()
    return parameters_of(model.module)


@case(join_with_zero)
@pytest.mark.integration("torch", "Join of DDP and ZeroRedundancyOptimizer, uneven inputs")
def test_join_with_zero(values: Values) -> None:
    assert_same_on_all_ranks(values)


# Hooks

HOOK_STEPS = 6
# How far a parameter may be from one process after six steps, where gradients are below 1 and
# the wire keeps so many bits: half a unit in the last place a step, twice (each rank, and the sum).
FP16 = HOOK_STEPS * LR * 2.0**-10
BF16 = HOOK_STEPS * LR * 2.0**-7
INT8 = HOOK_STEPS * LR * 2.0**-6


def powersgd_state(start: int = 2) -> Any:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=start, min_compression_rate=1.0
    )


def world() -> Any:
    return dist.group.WORLD


def local_sgd_state() -> Any:
    # Beyond the last step: as long as it is a plain all_reduce it can be compared.
    return post_localSGD_hook.PostLocalSGDState(None, world(), start_localSGD_iter=100)


def none() -> None:
    return None


def renamed(hook: Any) -> Any:
    """torch's DDP refuses the bf16 hooks on CPU, by their names; they run all the same."""

    def under_another_name(state: Any, bucket: dist.GradBucket) -> Any:
        return hook(state, bucket)

    del under_another_name.__annotations__["return"]
    return under_another_name


# By name: what makes the state, what makes the hook, and the tolerance; None: ranks agree.
HOOKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], float | None]] = {
    "allreduce": (none, lambda: default_hooks.allreduce_hook, EXACT),
    "fp16_compress": (none, lambda: default_hooks.fp16_compress_hook, FP16),
    "bf16_compress": (none, lambda: renamed(default_hooks.bf16_compress_hook), BF16),
    "fp16_compress_wrapper": (
        none,
        lambda: default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        FP16,
    ),
    "bf16_compress_wrapper": (
        none,
        lambda: renamed(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        BF16,
    ),
    "quantization_pertensor": (world, lambda: quantization_hooks.quantization_pertensor_hook, INT8),
    "powerSGD, ordered": (
        powersgd_state,
        lambda: ordered(powerSGD_hook.powerSGD_hook),
        None,
    ),
    "powerSGD, bare": (powersgd_state, lambda: powerSGD_hook.powerSGD_hook, None),
    "post_localSGD": (local_sgd_state, lambda: post_localSGD_hook.post_localSGD_hook, EXACT),
}


def train_with_hook(rank: int, world_size: int, name: str) -> Any:
    make_state, make_hook, _ = HOOKS[name]
    model = small_buckets()
    model.register_comm_hook(make_state(), make_hook())
    train(model, torch.optim.SGD(model.parameters(), lr=LR), rank, world_size, HOOK_STEPS)
    return parameters_of(model.module)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=case(train_with_hook, name)) for name in HOOKS]
)
@pytest.mark.integration("torch", "DDP comm hook")
def test_hook(name: str, values: Values, note: Any) -> None:
    if name.startswith("bf16"):
        note("under another name: torch's DDP refuses it on CPU by its own")
    assert_same_on_all_ranks(values)
    if (tolerance := HOOKS[name][2]) is not None:
        assert_close(values[0], parameters_of(train_alone(HOOK_STEPS, LR)[1]), tolerance)


# Two hooks of torch 2.13 fail in their own Python code, on gloo as well. Where they do not any
# more, they must be right. Each has its reason, and what the error and its stack must hold.
BROKEN: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, tuple[str, str]]] = {
    "batched_powerSGD": (
        powersgd_state,
        lambda: ordered(powerSGD_hook.batched_powerSGD_hook),
        "its `_orthogonalize` wants a batch of matrices and gets one",
        ("powerSGD_hook.py", "_orthogonalize"),
    ),
    "quantization_perchannel": (
        world,
        lambda: quantization_hooks.quantization_perchannel_hook,
        "it takes all_gather's future for the one tensor that NCCL's holds",
        ("quantization_hooks.py", "dequantize_and_aggregate"),
    ),
}


def train_with_broken_hook(rank: int, world_size: int, name: str) -> Any:
    make_state, make_hook, *_ = BROKEN[name]
    model = small_buckets()
    model.register_comm_hook(make_state(), make_hook())
    try:
        train(model, torch.optim.SGD(model.parameters(), lr=LR), rank, world_size, HOOK_STEPS)
    except (AssertionError, RuntimeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        return str(error) + "".join(f"{frame.filename}:{frame.name}" for frame in frames)
    return parameters_of(model.module)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=case(train_with_broken_hook, name)) for name in BROKEN]
)
@pytest.mark.integration("torch", "DDP comm hook")
def test_hook_that_fails_in_torch(name: str, values: list[Any], note: Any) -> None:
    if all(isinstance(value, str) for value in values):
        assert_fails_in_torch(name, values)
        pytest.xfail(f"torch's own mistake, on gloo as well: {BROKEN[name][2]}")
    assert_same_on_all_ranks(values)


def assert_fails_in_torch(name: str, values: list[str]) -> None:
    for value in values:
        assert isinstance(value, str), "it fails on some ranks only"
        assert "ddp_comm_hooks" in value and "code=" not in value, value
        for text in BROKEN[name][3]:
            assert text in value, value


@pytest.mark.parametrize("name", BROKEN)
def test_that_hook_fails_on_gloo_as_well(name: str) -> None:
    results = run_ranks(
        2,
        train_with_broken_hook,
        args=(name,),
        backend="gloo",
        only_pycomm=False,
        preload=PRELOAD,
    )
    values = results.values()
    if not any(isinstance(value, str) for value in values):
        pytest.skip(f"torch {torch.__version__} has mended it")
    assert_fails_in_torch(name, values)


def train_with_noop(rank: int, world_size: int) -> Any:
    model = small_buckets()
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    loss_of(model, batch_of(0, rank, world_size)).backward()
    # In this process too: the sums of a gradient depend on how many threads it has.
    alone = make_model()
    loss_of(alone, batch_of(0, rank, world_size)).backward()
    return [
        (got.grad, wanted.grad)
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True)
    ]


@case(train_with_noop)
@pytest.mark.integration("torch", "DDP comm hook [noop]: each rank keeps its own gradients")
def test_noop_hook(values: list[Any]) -> None:
    for gradients in values:
        for got, wanted in gradients:
            assert torch.equal(got, wanted)
    mine, others = ([got for got, _ in gradients] for gradients in values)
    assert not any(torch.equal(*pair) for pair in zip(mine, others, strict=True))


def train_with_overlapped_optimizer(rank: int, world_size: int) -> Any:
    model = small_buckets()
    optimizer_hook = optimizer_overlap_hooks._hook_then_optimizer(
        default_hooks.allreduce_hook,
        optimizer_overlap_hooks._OptimizerHookState(
            functional_sgd(), params=list(model.parameters())
        ),
    )
    model.register_comm_hook(None, optimizer_hook)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, batch_of(step, rank, world_size)).backward()
    return parameters_of(model.module)


def functional_sgd() -> Any:
    from torch.distributed.optim.utils import as_functional_optim

    return as_functional_optim(torch.optim.SGD, LR)


@case(train_with_overlapped_optimizer)
@pytest.mark.integration("torch", "DDP with the optimizer in the hook, equal to one process")
def test_overlapped_optimizer(values: Values) -> None:
    assert_same_on_all_ranks(values)
    assert_close(values[0], parameters_of(train_alone(STEPS, LR)[1]), EXACT)


# ZeRO


def train_with_zero(rank: int, world_size: int, overlap: bool) -> Any:
    model = small_buckets(gradient_as_bucket_view=True, static_graph=overlap)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=overlap, lr=LR, momentum=0.9
    )
    if overlap:
        hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)
    warm_up = 2 if overlap else 0  # until then it learns where the buckets are, and does not step
    for step in range(-warm_up, STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(max(step, 0), rank, world_size)).backward()
        optimizer.step()
    held = sum(len(state) for state in optimizer.optim.state.values()) if not overlap else -1
    return held, parameters_of(model.module)


@pytest.mark.parametrize(
    "overlap",
    [pytest.param(flag, marks=case(train_with_zero, flag)) for flag in (False, True)],
    ids=["plain", "overlapped with DDP"],
)
@pytest.mark.integration("torch", "ZeroRedundancyOptimizer")
def test_zero(overlap: bool, values: list[Any]) -> None:
    assert_same_on_all_ranks([parameters for _, parameters in values])
    if overlap:
        return
    alone = make_model()
    train(alone, torch.optim.SGD(alone.parameters(), lr=LR, momentum=0.9), 0, 1)
    assert_close(values[0][1], parameters_of(alone), 2 * EXACT)
    count = len(list(alone.parameters()))
    assert sum(held for held, _ in values) == count and all(held < count for held, _ in values)


# Model averaging: each rank trains a model of its own, and now and then they become one

AVERAGED_STEPS = 8


def periodic() -> Any:
    return averagers.PeriodicModelAverager(period=2, warmup_steps=2)


def hierarchical() -> Any:
    return hierarchical_model_averager.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))


def train_and_average(rank: int, world_size: int, averager_name: str) -> Any:
    averager = {"periodic": periodic, "hierarchical": hierarchical}[averager_name]()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(AVERAGED_STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(step, rank, world_size)).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return parameters_of(model)


def train_with_post_local_sgd(rank: int, world_size: int) -> Any:
    alone, _ = dist.new_subgroups(group_size=1)
    model = small_buckets()
    state = post_localSGD_hook.PostLocalSGDState(
        None, alone, start_localSGD_iter=2, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=LR), periodic())
    train(model, optimizer, rank, world_size, AVERAGED_STEPS)
    return parameters_of(model.module)


def average_by_hand(world_size: int, group_size: Callable[[int], int]) -> Values:
    """In one process; after step i, neighbours in groups of `group_size(i)` become one."""
    models = [make_model() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    for step in range(AVERAGED_STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch_of(step, rank, world_size)).backward()
            optimizer.step()
        size = group_size(step)
        for first in range(0, world_size, size):
            together = models[first : first + size]
            for same in zip(*(model.parameters() for model in together), strict=True):
                mean = torch.stack([parameter.detach() for parameter in same]).mean(0)
                for parameter in same:
                    parameter.data.copy_(mean)
    return [parameters_of(model) for model in models]


def assert_as_by_hand(values: Values, group_size: Callable[[int], int]) -> None:
    by_hand = average_by_hand(len(values), group_size)
    assert digest(by_hand[0].values()) != digest(by_hand[1].values())  # they are apart at the end
    for got, wanted in zip(values, by_hand, strict=True):
        assert_close(got, wanted, EXACT)


def every_second_step(step: int) -> int:
    return 2 if step >= 2 and step % 2 == 0 else 1


@case(train_and_average, "periodic")
@pytest.mark.integration("torch", "PeriodicModelAverager, equal to averaging by hand")
def test_periodic_averager(values: Values) -> None:
    assert_as_by_hand(values, every_second_step)


@case(train_and_average, "hierarchical", world_size=4)
@pytest.mark.integration("torch", "HierarchicalModelAverager on 4 ranks, equal to by hand")
def test_hierarchical_averager(values: Values) -> None:
    assert_as_by_hand(values, lambda step: 4 if step % 4 == 0 else 2 if step % 2 == 0 else 1)


@case(train_with_post_local_sgd)
@pytest.mark.integration("torch", "post-local SGD: hook and PostLocalSGDOptimizer, as by hand")
def test_post_local_sgd(values: Values) -> None:
    # For SGD from one model, averaging gradients and averaging what they lead to are the same.
    assert_as_by_hand(values, lambda step: 2 if step < 2 else every_second_step(step))
