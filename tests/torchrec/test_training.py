"""Training with sharded tables: over pycomm as over gloo, and as in one process."""

from __future__ import annotations

import functools

import pytest
import training
from ranks import run_ranks
from training import SPECS

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(1200)]

OVER = {
    "gloo": {"backend": "gloo"},
    "shared memory": {},
    "tcp": {"env": {"PYCOMM_TRANSPORT": "tcp"}},
}
SIZES = (2, 4)
OTHER_ORDER = 2e-6  # relative: fp32 sums in another order
ROUNDED = 5e-5  # the same, and then rounded to fp16, where that may fall to another side


@functools.cache
def losses(world_size: int, over: str) -> list[dict[str, list[float]]]:
    """By rank and spec. All specs are trained in the same processes."""
    return run_ranks(
        world_size,
        training.train,
        args=(SPECS,),
        preload=training.PRELOAD,
        timeout_s=550.0,
        **OVER[over],
    ).values()


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("over", ["shared memory", "tcp"])
@pytest.mark.parametrize("name", SPECS)
def test_losses_equal_those_over_gloo(name: str, over: str, world_size: int) -> None:
    ours, gloo = losses(world_size, over), losses(world_size, "gloo")
    for rank in range(world_size):
        assert len(ours[rank][name]) == training.STEPS
        if world_size == 2:  # a + b = b + a
            assert ours[rank][name] == gloo[rank][name]
        bound = ROUNDED if SPECS[name].wire_dtype else OTHER_ORDER
        assert ours[rank][name] == pytest.approx(gloo[rank][name], rel=bound)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", training.AS_ONE_PROCESS)
def test_losses_equal_those_of_one_process(name: str, world_size: int) -> None:
    alone = training.train_alone(SPECS[name], world_size)
    assert losses(world_size, "shared memory")[0][name] == pytest.approx(alone, rel=OTHER_ORDER)
    assert len({round(loss, 6) for loss in alone}) > training.STEPS // 2  # it does train


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", ["bags", "single"])
def test_fp16_wire_rounds_and_trains(kind: str, world_size: int) -> None:
    by_name = losses(world_size, "shared memory")[0]
    exact = training.train_alone(SPECS[f"{kind}, fp16 wire"], world_size)
    assert by_name[f"{kind}, fp16 wire"] != pytest.approx(exact, rel=OTHER_ORDER)  # it is used
    assert by_name[f"{kind}, fp16 wire"] == pytest.approx(exact, rel=2e-3)


def description(rank: int, world_size: int) -> str:
    from pycomm._group.creation import native_backend
    from pycomm._native import loader

    training.losses_of(rank, world_size, training.Spec(steps=1))
    return loader.load().describe_backend(native_backend(None))


@pytest.mark.parametrize("over", ["shared memory", "tcp"])
def test_the_group_uses_this_transport(over: str) -> None:
    options = OVER[over]
    for described in run_ranks(2, description, preload=training.PRELOAD, **options).values():
        assert ("shared memory" in described) == (over == "shared memory"), described
