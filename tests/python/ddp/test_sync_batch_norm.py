"""pycomm.SyncBatchNorm on N ranks equals torch's BatchNorm in one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.needs_native

CHANNELS = 5


def batches(size: int, sizes: list[int], trailing: tuple[int, ...], dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(count, CHANNELS, *trailing, generator=generator) * 3 + 100 * (rank == 1)).to(
            dtype
        )
        for rank, count in enumerate(sizes[:size])
    ]


def one_process(whole: torch.Tensor, weights: torch.Tensor, layer: torch.nn.Module) -> Any:
    whole = whole.clone().requires_grad_()
    output = layer(whole)
    (output * weights).sum().backward()
    return output.detach(), whole.grad


def like_one_process(rank: int, size: int, options: dict[str, Any], sizes: list[int]) -> None:
    import pycomm

    for dtype in (torch.float32, torch.float64):
        for trailing in ((), (4,), (3, 2)):
            parts = batches(size, sizes, trailing, dtype)
            whole = torch.cat(parts)
            kind = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d}
            torch.manual_seed(3)
            reference = kind[len(trailing)](CHANNELS, **options).to(dtype)
            if reference.affine:
                torch.nn.init.normal_(reference.weight)
                torch.nn.init.normal_(reference.bias)
            ours = pycomm.SyncBatchNorm(CHANNELS, **options).to(dtype)
            ours.load_state_dict(reference.state_dict())
            first = sum(sizes[:rank])
            own = slice(first, first + sizes[rank])
            close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
            if dtype == torch.float64:
                close = {"rtol": 1e-10, "atol": 1e-10}
            for step in range(2):
                weights = torch.randn(
                    whole.shape, generator=torch.Generator().manual_seed(step)
                ).to(dtype)
                wanted, wanted_grad = one_process(whole, weights, reference)
                mine = parts[rank].clone().requires_grad_()
                output = ours(mine)
                (output * weights[own]).sum().backward()
                torch.testing.assert_close(output.detach(), wanted[own], **close)
                torch.testing.assert_close(mine.grad, wanted_grad[own], **close)
            for ours_has, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
                dist.all_reduce(ours_has.grad)  # summed, as the loss here is a sum
                torch.testing.assert_close(ours_has.grad, wanted.grad, rtol=1e-3, atol=1e-3)
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(dict(ours.named_buffers())[name], buffer, **close)
                everywhere = [torch.empty_like(buffer) for _ in range(size)]
                dist.all_gather(everywhere, dict(ours.named_buffers())[name])
                assert all(torch.equal(each, everywhere[0]) for each in everywhere)
            if reference.track_running_stats:  # without, evaluation uses each rank's own batch
                ours.eval(), reference.eval()
                torch.testing.assert_close(ours(parts[rank]), reference(whole)[own], **close)


@pytest.mark.ci
@pytest.mark.parametrize("sizes", rings.first_of([[5, 0, 2], [4, 4, 4], [1, 6, 3]]), ids=str)
def test_equals_one_process(sizes: list[int]) -> None:
    run_ranks(3, like_one_process, args=({}, sizes))


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    rings.ends(
        [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}]
    ),
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    run_ranks(2, like_one_process, args=(options, [3, 5]))


@pytest.mark.ci
def test_over_another_backend() -> None:
    run_ranks(2, like_one_process, args=({}, [3, 5]), backend="gloo", only_pycomm=False)


def converted(rank: int, size: int) -> None:
    import pycomm

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, CHANNELS, 1),
        torch.nn.BatchNorm2d(CHANNELS),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(CHANNELS * 9)),
    )
    parameters = list(model.parameters())
    model = pycomm.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    layers = [each for each in model.modules() if isinstance(each, pycomm.SyncBatchNorm)]
    assert len(layers) == 2
    shared = torch.nn.BatchNorm1d(4)
    inner = torch.nn.Sequential(shared)
    twice = torch.nn.Sequential(shared, inner, torch.nn.Linear(4, 4), shared, inner)
    twice = pycomm.SyncBatchNorm.convert_sync_batchnorm(twice)
    (layer,) = [each for each in twice.modules() if isinstance(each, pycomm.SyncBatchNorm)]
    assert twice[0] is twice[1][0] is twice[3] is twice[4][0] is layer
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    inputs = torch.randn(4 + rank, 2, 3, 3).to(memory_format=torch.channels_last)
    wrapped(inputs).square().mean().backward()
    assert all(each.grad is not None for each in parameters)
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(inputs)
    group = dist.new_group(list(range(size)))
    layer = pycomm.SyncBatchNorm(CHANNELS, process_group=group)
    assert torch.isfinite(layer(torch.randn(2, CHANNELS).bfloat16())).all()


@pytest.mark.ci
def test_convert() -> None:
    run_ranks(2, converted)


def changed_in_place(rank: int, size: int) -> None:
    import pycomm

    for affine in (False, True):
        grads = []
        for in_place in (False, True):
            layers = torch.nn.Sequential(
                pycomm.SyncBatchNorm(CHANNELS, affine=affine), torch.nn.ReLU(inplace=in_place)
            )
            generator = torch.Generator().manual_seed(rank)
            batch = torch.randn(4, CHANNELS, generator=generator).requires_grad_()
            layers(batch).square().sum().backward()
            grads.append(batch.grad)
        assert torch.equal(*grads)


def test_the_next_layer_may_change_the_output_in_place() -> None:
    run_ranks(2, changed_in_place)


def groups_of_one(rank: int, size: int) -> None:
    import pycomm

    single = dist.new_group([0])
    layer = pycomm.SyncBatchNorm(CHANNELS, process_group=single)
    if rank != 0:
        with pytest.raises(ValueError, match="not in the layer's process_group"):
            layer(torch.randn(4, CHANNELS))
        return
    reference = torch.nn.BatchNorm1d(CHANNELS)
    batch = torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(batch), reference(batch))
    torch.testing.assert_close(layer.running_var, reference.running_var)


def test_a_group_of_one_rank() -> None:
    run_ranks(2, groups_of_one)
    run_ranks(1, like_one_process, args=({}, [4]))


def nothing_to_normalize(rank: int, size: int) -> None:
    import pycomm

    layer = pycomm.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="more than one value"):
        layer(torch.randn(1 - rank, CHANNELS))
    with pytest.raises(ValueError, match="5 channels"):
        layer(torch.randn(2, CHANNELS + 1))


def test_too_few_values() -> None:
    run_ranks(2, nothing_to_normalize)


def twice_differentiated(rank: int, size: int) -> None:
    import pycomm

    layers = torch.nn.Sequential(torch.nn.Linear(3, CHANNELS), pycomm.SyncBatchNorm(CHANNELS))
    batch = torch.randn(4, 3, requires_grad=True)
    loss = layers(batch).square().sum()
    (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    run_ranks(2, twice_differentiated).check()
