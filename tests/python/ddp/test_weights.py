"""``weight="samples"``: ranks that count by their samples, beside one process with all batches."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
import types
from collections.abc import Iterator
from typing import Any

import ddp_shapes
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
import weighed_means
from ddp_rig import all_ranks, wrap
from torch import nn

from pycomm.errors import UnsupportedError

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

WIRES = (None, "fp16", "bf16", "int8")


class Net(nn.Module):
    """Large enough for an encoded bucket: 16 KiB."""

    def __init__(self, dtype: torch.dtype, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(9, width, dtype=dtype)
        self.inner = nn.Linear(width, width, dtype=dtype)
        self.last = nn.Linear(width, 2, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(batch)))))


def batch_of(rank: int, step: int, samples: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, 9, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    return (output - batch[:, :2]).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten().double() for each in model.parameters()])


def samples_of(rank: int, step: int) -> int:
    """Unequal, and none on one rank now and then."""
    table = ((5, 3, 0, 8), (1, 7, 4, 2), (0, 6, 1, 9), (32, 1, 3, 0), (4, 4, 4, 4))
    return table[step % len(table)][rank]


def same_everywhere(values: torch.Tensor) -> bool:
    return all(torch.equal(values, each) for each in all_ranks(values))


def beside_one_process(rank: int, world_size: int) -> list[tuple[str, float, float, bool]]:
    """Of each dtype, wire and kind of pass: how far off the mean by hand, by what it may be; and
    off one process with all batches, by the largest gradient of the parameter."""
    found = []
    cases: list[tuple[torch.dtype, str | None, dict[str, Any]]] = [
        *((torch.float32, wire, {}) for wire in WIRES),
        (torch.float64, None, {}),
        (torch.bfloat16, None, {}),
        (torch.float16, None, {}),
        (torch.float32, None, {"find_unused_parameters": True}),
        (torch.float32, None, {"static_graph": True}),
        (torch.float32, "int8", {"gradient_as_bucket_view": False}),
        (torch.float32, "fp16", {"bucket_cap_mb": 0.001}),
    ]
    for dtype, wire, options in cases:
        net = Net(dtype)
        model = wrap(copy.deepcopy(net), weight="samples", wire_dtype=wire, **options)
        worst, off_union, same = 0.0, 0.0, True
        for step in range(10):
            samples = samples_of(rank, step)
            model.zero_grad()
            if samples == 0:
                model.no_batch()
            else:
                loss_of(model, batch_of(rank, step, samples, dtype)).backward()
            each_rank = [own_share(net, r, step, dtype) for r in range(world_size)]
            wanted = weighed_means.means([each_rank])
            off = weighed_means.errors(model.module, wanted, wire=wire, ranks=world_size)
            worst = max(worst, *off.values())
            off_union = max(off_union, off_by_parameter(model, net, world_size, step, dtype))
            same = same and same_everywhere(gradients(model))
        found.append((f"{dtype} {wire} {options}", worst, off_union, same))
    return found


def own_share(
    net: nn.Module, rank: int, step: int, dtype: torch.dtype
) -> tuple[float, dict[str, Any]]:
    samples = samples_of(rank, step)
    if samples == 0:
        return 0.0, {}
    batch = batch_of(rank, step, samples, dtype)
    return float(samples), weighed_means.own_gradients(net, loss_of, batch)


def off_by_parameter(
    model: Any, net: nn.Module, world_size: int, step: int, dtype: torch.dtype
) -> float:
    whole = copy.deepcopy(net).double()
    whole.zero_grad()
    batches = [batch_of(r, step, samples_of(r, step), dtype) for r in range(world_size)]
    loss_of(whole, torch.cat(batches).double()).backward()
    worst = 0.0
    for mine, right in zip(model.parameters(), whole.parameters(), strict=True):
        assert right.grad is not None
        off = (mine.grad.double() - right.grad).abs().max() / right.grad.abs().max()
        worst = max(worst, float(off))
    return worst


UNION = {"torch.float64 None": 1e-14, "torch.float32 None": 1e-6}
"""Of the others, gradients of one rank alone are coarser than what this compares."""


@pytest.mark.parametrize("world_size", rings.first_of([3, 2, 4]))
def test_averages_are_those_of_one_process_with_all_batches(world_size: int) -> None:
    found = ranks.run_ranks(world_size, beside_one_process, timeout_s=200, preload=ranks.TORCH_DDP)
    for results in found.values():
        compared = 0
        for case, worst, off_union, same in results:
            assert worst <= 1, case
            if (kind := case.partition(" {")[0]) in UNION:
                compared += 1
                assert off_union < UNION[kind], case
            assert same, f"{case}: ranks have other bits"
        assert compared > len(UNION)


def test_a_list_of_images_counts_as_many_as_they_have_colours() -> None:
    """docs/unequal-machines.md says so: pycomm cannot tell."""
    from pycomm.ddp.weights import count_samples

    images = [torch.zeros(3, 8, 8), torch.zeros(3, 6, 9)]
    assert count_samples((images,), {})[0] == 3


def test_the_steps_of_a_cuda_device_are_refused() -> None:
    from pycomm.ddp.weights import Weighed

    module = types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(is_cuda=True)])
    wrapper = types.SimpleNamespace(_weight="samples", _sync_every=1, module=module)
    with pytest.raises(UnsupportedError, match="cannot time steps of a CUDA device"):
        Weighed.step_log.fget(wrapper)  # type: ignore[attr-defined]


def int8_buckets(rank: int, world_size: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Over int8, of each parameter: the largest error, by what it may be in float32 and in int8."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for case, width, options in (
        ("one below 16 KiB", 16, {}),
        ("one above", 64, {}),
        ("below and above", 64, {"bucket_cap_mb": 0.001}),
    ):
        net = Net(torch.float32, width)
        model = wrap(copy.deepcopy(net), weight="samples", wire_dtype="int8", **options)
        worst = dict.fromkeys(dict(net.named_parameters()), (0.0, 0.0))
        for step in range(10):
            model.zero_grad()
            if (samples := samples_of(rank, step)) == 0:
                model.no_batch()
            else:
                loss_of(model, batch_of(rank, step, samples, torch.float32)).backward()
            of_ranks = [own_share(net, r, step, torch.float32) for r in range(world_size)]
            wanted = weighed_means.means([of_ranks])
            plain, coded = (
                weighed_means.errors(model.module, wanted, wire=wire, ranks=world_size)
                for wire in (None, "int8")
            )
            for name, (one, other) in worst.items():
                worst[name] = max(one, plain[name]), max(other, coded[name])
        found[case] = worst
    return found


@pytest.mark.parametrize("world_size", rings.first_of([2, 3, 4]))
def test_int8_encodes_buckets_of_16_kib_and_sends_smaller_ones_in_float32(world_size: int) -> None:
    found = ranks.run_ranks(world_size, int8_buckets, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert all(plain <= 1 for plain, _ in results["one below 16 KiB"].values())
        assert all(coded <= 1 < plain for plain, coded in results["one above"].values())
        both = results["below and above"]
        assert all(coded <= 1 for _, coded in both.values())
        assert both["inner.weight"][0] > 1  # 16 KiB itself
        assert max(both["first.weight"][0], both["first.bias"][0]) <= 1  # the last bucket


def encoded_passes(rank: int, world_size: int) -> dict[str, float]:
    """Passes of unequal weights that accumulate, over wires that round, by what is allowed; and
    with error feedback, what has arrived and is kept beside what was given."""
    found = {}
    for wire, passes in itertools.product(("fp16", "bf16", "int8"), (2, 4)):
        net = Net(torch.float32)
        model = wrap(copy.deepcopy(net), weight="samples", wire_dtype=wire, accumulate=passes)
        worst = 0.0
        given = {name: 0.0 for name, _ in net.named_parameters()}
        largest = 0.0
        for step in range(4):
            model.zero_grad()
            of_step = []
            for number in range(passes):
                weights = [WEIGHTS[(r + step) % 4][number] for r in range(world_size)]
                batches = [
                    batch_of(r, passes * step + number, 5, torch.float32) for r in range(world_size)
                ]
                model.samples = weights[rank]
                loss_of(model, batches[rank]).backward()
                of_step.append(
                    [
                        (float(weight), weighed_means.own_gradients(net, loss_of, batch))
                        for weight, batch in zip(weights, batches, strict=True)
                    ]
                )
            wanted = weighed_means.means(of_step)
            off = weighed_means.errors(model.module, wanted, wire=wire, ranks=world_size)
            worst = max(worst, *off.values())
            for name, each in model.module.named_parameters():
                given[name] = given[name] + wanted[name].value - weighed_means.wide(each.grad)
                largest = max(largest, float(wanted[name].sizes.max()))
        found[f"{wire} {passes}"] = worst
        if wire == "int8":
            kept = model.communication_state_dict()["residuals"]
            for name, lacking in given.items():
                of_ranks = sum(each.double().numpy() for each in all_ranks(kept[name]))
                off_kept = float(abs(of_ranks - lacking).max())
                found[f"{name} kept, {passes}"] = off_kept / (1e-6 * largest)
    return found


@pytest.mark.parametrize("world_size", rings.first_of([3, 2, 4]))
def test_passes_of_unequal_weights_over_wires_that_round(world_size: int) -> None:
    found = ranks.run_ranks(world_size, encoded_passes, timeout_s=200, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert {case: off for case, off in results.items() if not off <= 1} == {}


def equal_weights(rank: int, world_size: int) -> list[str]:
    """Bits, with and without weights, of all shapes of models. On 3 ranks first: of 2, a part of
    1/2 is exact however it is found."""
    wrong = []
    for name, shape in ddp_shapes.SHAPES.items():
        models = [
            wrap(ddp_shapes.make(name), weight=weight, **shape.options)
            for weight in (None, "samples")
        ]
        for step in range(4):
            batch = ddp_shapes.batch_of(name, rank, step)
            for model in models:
                model.zero_grad()
                shape.loss(model, batch).backward()
            for (key, one), other in zip(
                models[0].named_parameters(), models[1].parameters(), strict=True
            ):
                if (one.grad is None) != (other.grad is None) or (
                    one.grad is not None and not torch.equal(dense(one.grad), dense(other.grad))
                ):
                    wrong.append(f"{name}, step {step}: {key}")
    return wrong


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_equal_weights_have_the_bits_of_no_weights(world_size: int) -> None:
    found = ranks.run_ranks(world_size, equal_weights, timeout_s=300, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * world_size


@contextlib.contextmanager
def no_sync_unless(model: Any, last: bool) -> Iterator[None]:
    if last:
        yield
    else:
        with model.no_sync():
            yield


def equal_in_each_wire(rank: int, world_size: int) -> list[str]:
    """The same over passes that accumulate, by the option, in no_sync() and by both, in each wire,
    with a weight that binary cannot hold."""
    wrong = []
    for dtype, wire in [*((torch.float32, wire) for wire in WIRES), (torch.float64, None)]:
        for accumulate, held in ((1, 1), (3, 1), (10, 1), (1, 3), (1, 10), (2, 2)):
            passes = accumulate * held
            models = [
                wrap(Net(dtype), wire_dtype=wire, weight=weight, accumulate=accumulate)
                for weight in (None, "samples")
            ]
            for step in range(20 if passes == 10 else 12):
                batch = batch_of(rank, step, 6, dtype)
                models[1].samples = 0.1
                for model in models:
                    if step % passes == 0:
                        model.zero_grad()
                    with no_sync_unless(model, step % held == held - 1):
                        loss_of(model, batch).backward()
                if not torch.equal(*map(gradients, models)):
                    how = f"accumulate={accumulate}, no_sync() in {held - 1} of {held}"
                    wrong.append(f"{dtype}, {wire}, {how}, step {step}")
    return wrong


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_equal_weights_have_the_bits_of_no_weights_in_each_wire(world_size: int) -> None:
    found = ranks.run_ranks(world_size, equal_in_each_wire, timeout_s=200, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[]] * world_size


WEIGHTS = ((24, 7, 3, 31), (5, 0, 8, 2), (1, 1, 0, 9), (0, 0, 0, 4))


def accumulated(rank: int, world_size: int) -> list[tuple[str, float]]:
    """Four passes a step, each of its own weight: k * sum(w g) / sum(w), g by hand."""
    found = []
    for how in ("no_sync", "accumulate"):
        net = Net(torch.float64)
        options = {"accumulate": 4} if how == "accumulate" else {}
        model = wrap(copy.deepcopy(net), weight="samples", **options)
        for step in range(3):
            model.zero_grad()
            total, right = 0.0, torch.zeros(1, dtype=torch.float64)
            for i in range(4):
                for r in range(world_size):
                    weight = WEIGHTS[(r + step) % 4][i]
                    single = copy.deepcopy(net)
                    loss_of(single, batch_of(r, 4 * step + i, 5, torch.float64)).backward()
                    right = right + weight * gradients(single)
                    total += weight
            for i in range(4):
                weight = WEIGHTS[(rank + step) % 4][i]
                batch = batch_of(rank, 4 * step + i, 5, torch.float64)
                sync = how == "accumulate" or i == 3
                with no_sync_unless(model, sync):
                    if weight == 0 and step == 1:
                        model.no_batch()
                    else:
                        model.samples = weight
                        loss = loss_of(model, batch)
                        (loss * math.nan if weight == 0 else loss).backward()
            mine = gradients(model)
            right = 4 * right / total
            found.append((f"{how} {step}", float((mine - right).abs().max() / right.abs().max())))
    return found


@pytest.mark.parametrize("world_size", rings.first_of([2, 4]))
def test_passes_that_accumulate_count_each_by_its_own_weight(world_size: int) -> None:
    found = ranks.run_ranks(world_size, accumulated, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        for case, off in results:
            assert off < 1e-12, case


def without_samples(rank: int, world_size: int) -> dict[str, Any]:
    model = wrap(Net(torch.float32), weight="samples", wire_dtype="int8")
    found: dict[str, Any] = {"errors": []}
    for step in range(6):
        model.zero_grad()
        empty = step in (1, 3) or (step == 4 and rank == 0)
        batch = batch_of(rank, step, 0 if empty else 4, torch.float32)
        try:
            if step == 3 and rank == 0:
                model.no_batch()
            else:
                loss_of(model, batch).backward()  # the mean of nothing is NaN
        except ValueError as error:
            found["errors"].append((step, str(error).splitlines()[0]))
        else:
            assert torch.isfinite(gradients(model)).all(), step
            assert same_everywhere(gradients(model)), step
    found["steps"] = model.stats().steps
    return found


def test_a_step_without_samples_is_a_named_error_on_all_ranks_and_the_wrapper_goes_on() -> None:
    found = ranks.run_ranks(2, without_samples, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        assert [step for step, _ in results["errors"]] == [1, 3]
        assert all("no rank has any samples" in text for _, text in results["errors"])
        assert results["steps"] == 4


def uneven_passes(rank: int, world_size: int) -> str:
    model = wrap(Net(torch.float32), weight="samples")
    batch = batch_of(rank, 0, 4, torch.float32)
    if rank == 1:
        with model.no_sync():
            loss_of(model, batch).backward()
    try:
        loss_of(model, batch).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_other_numbers_of_passes_are_named() -> None:
    found = ranks.run_ranks(2, uneven_passes, timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "rank 1 has made 2 backward passes since the last reduction" in text
        assert "rank 0 has made 1" in text


def changing_weights(rank: int, world_size: int) -> tuple[float, float, float]:
    """int8 with error feedback, where each rank in turn weighs 1,000 times as much: the sum of 60
    steps, with and without what is kept, and the last step."""
    net = Net(torch.float32)
    model = wrap(copy.deepcopy(net), weight="samples", wire_dtype="int8")
    arrived = torch.zeros(1, dtype=torch.float64)
    right = torch.zeros(1, dtype=torch.float64)
    for step in range(60):
        weights = [(1000.0 if r == step % 2 else 1.0) * (1 + r) for r in range(world_size)]
        model.zero_grad()
        model.samples = weights[rank]
        loss_of(model, batch_of(rank, 0, 5, torch.float32)).backward()
        arrived = arrived + gradients(model)
        whole = torch.zeros(1, dtype=torch.float64)
        for r in range(world_size):
            single = copy.deepcopy(net).double()
            loss_of(single, batch_of(r, 0, 5, torch.float32).double()).backward()
            whole = whole + weights[r] * gradients(single) / sum(weights)
        right = right + whole
    residuals = model.communication_state_dict()["residuals"]
    kept = torch.cat([residuals[name].flatten() for name, _ in model.module.named_parameters()])
    whole_sum = arrived + torch.stack(all_ranks(kept.double())).sum(0)
    single_step = float((gradients(model) - whole).abs().max() / whole.abs().max())
    off, off_with_kept = (
        float((each - right).abs().max() / right.abs().max()) for each in (arrived, whole_sum)
    )
    return off, off_with_kept, single_step


def test_residuals_have_the_unit_of_averages_whatever_the_weights() -> None:
    found = ranks.run_ranks(2, changing_weights, timeout_s=100, preload=ranks.TORCH_DDP)
    for off, off_with_kept, single_step in found.values():
        assert off < 3e-4  # feedback: of 60 steps only the last loss is left
        assert off_with_kept < 1e-6
        assert single_step < 2e-2


def forwards_and_hooks(rank: int, world_size: int) -> dict[str, float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = {}
    net = Net(torch.float64)

    def compare(model: Any, weights: list[float], batches: list[torch.Tensor]) -> float:
        right = torch.zeros(1, dtype=torch.float64)
        for weight, batch in zip(weights, batches, strict=True):
            single = copy.deepcopy(net)
            loss_of(single, batch).backward()
            right = right + weight * gradients(single) / sum(weights)
        return float((gradients(model) - right).abs().max() / right.abs().max())

    batches = [batch_of(r, 3, 2 + 3 * r, torch.float64) for r in range(world_size)]
    weights = [2.0 + 3 * r for r in range(world_size)]

    model = wrap(copy.deepcopy(net), weight="samples")
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    loss_of(model, batches[rank]).backward()
    found["comm hook"] = compare(model, weights, batches)

    model = wrap(copy.deepcopy(net), weight="samples")
    with torch.no_grad():
        model(batches[rank][:1])
    model(batches[rank][:1])  # its graph is dropped
    loss_of(model, batches[rank]).backward()
    found["forwards without backward"] = compare(model, weights, batches)

    model.zero_grad()
    model(batch_of(9, 9, 1, torch.float64)).sum().mul(0).add(
        loss_of(model, batches[rank])
    ).backward()
    found["two forwards: the last one counts"] = compare(model, weights, batches)

    model.zero_grad()
    loss = loss_of(model, batches[rank])
    model.samples = 10.0 + rank  # after forward
    loss.backward()
    found["said after forward"] = compare(model, [10.0 + r for r in range(world_size)], batches)
    model.zero_grad()
    loss_of(model, batches[rank]).backward()
    found["detected again"] = compare(model, weights, batches)

    model.zero_grad()
    model.samples = 1.0
    one = loss_of(model, batches[rank])
    model.samples = 3.0 + rank
    other = loss_of(model, batches[rank])
    one.backward()  # each of two graphs has the weight that was said before it
    found["said before each forward: the first"] = compare(model, [1.0] * world_size, batches)
    model.zero_grad()
    other.backward()
    said = [3.0 + r for r in range(world_size)]
    found["said before each forward: the second"] = compare(model, said, batches)

    # A generator's step goes through the discriminator past the wrapper, which zero_grad() forgets.
    model.zero_grad()
    loss_of(model.module, batches[rank]).backward()
    model.zero_grad()
    loss_of(model, batches[rank]).backward()
    found["after a backward past the wrapper"] = compare(model, weights, batches)

    # A penalty of its own backward counts with the pass after it.
    model.zero_grad()
    sum(each.square().sum() for each in model.parameters()).backward()
    penalty = gradients(model)
    loss_of(model, batches[rank]).backward()
    with_penalty = gradients(model)
    model.zero_grad()
    loss_of(model, batches[rank]).backward()
    far = (with_penalty - gradients(model) - penalty).abs().max() / penalty.abs().max()
    found["a penalty"] = float(far)

    # Passes that zero_grad() forgets, of which one rank had no batch.
    model.zero_grad()
    with model.no_sync():
        if rank == 1:
            model.no_batch()
        else:
            loss_of(model, batches[rank]).backward()
    model.zero_grad()
    loss_of(model, batches[rank]).backward()
    found["after passes that were forgotten"] = compare(model, weights, batches)

    frozen = copy.deepcopy(net)
    model = wrap(frozen, weight="samples")
    loss_of(model, batches[rank]).backward()
    model.module.last.requires_grad_(False)
    model.zero_grad()
    loss_of(model, batches[rank]).backward()
    inner = model.module.inner.weight.grad
    whole = torch.zeros_like(inner)
    for weight, batch in zip(weights, batches, strict=True):
        single = copy.deepcopy(net)
        loss_of(single, batch).backward()
        assert single.inner.weight.grad is not None
        whole += weight * single.inner.weight.grad / sum(weights)
    found["frozen"] = float((inner - whole).abs().max() / whole.abs().max())
    return found


def test_forwards_hooks_and_frozen_parameters() -> None:
    found = ranks.run_ranks(2, forwards_and_hooks, timeout_s=100, preload=ranks.TORCH_DDP)
    for results in found.values():
        for case, off in results.items():
            assert off < 1e-12, case


def synced(rank: int, world_size: int) -> tuple[float, bool]:
    """Every rank is a host of its own here: parameters are averaged by samples since the sync."""
    import pycomm.ddp.wrapper

    pycomm.ddp.wrapper.host_group = lambda group: dist.new_group(
        [dist.get_rank()], use_local_synchronization=True
    )
    net = Net(torch.float64)
    model = wrap(copy.deepcopy(net), weight="samples", sync_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = [copy.deepcopy(net) for _ in range(world_size)]
    for step in range(6):
        optimizer.zero_grad()
        if samples_of(rank, step) == 0:
            model.no_batch()
        else:
            loss_of(model, batch_of(rank, step, samples_of(rank, step), torch.float64)).backward()
        optimizer.step()
        for r, single in enumerate(alone):
            if samples_of(r, step) == 0:
                continue
            single.zero_grad()
            loss_of(single, batch_of(r, step, samples_of(r, step), torch.float64)).backward()
            with torch.no_grad():
                for each in single.parameters():
                    each -= 0.1 * each.grad
        if step % 2 == 1:
            weights = [sum(samples_of(r, s) for s in (step - 1, step)) for r in range(world_size)]
            with torch.no_grad():
                for same in zip(*(single.parameters() for single in alone), strict=True):
                    mean = sum(w * each for w, each in zip(weights, same, strict=True)) / sum(
                        weights
                    )
                    for each in same:
                        each.copy_(mean)
    model.sync()
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    right = torch.cat([each.detach().flatten() for each in alone[0].parameters()])
    return float((mine - right).abs().max()), same_everywhere(mine)


def test_a_sync_weighs_parameters_by_samples_since_the_last_one() -> None:
    found = ranks.run_ranks(3, synced, timeout_s=60, preload=ranks.TORCH_DDP)
    for off, same in found.values():
        assert off < 1e-14
        assert same


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(40, 6, sparse=True, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words).square().mean(dim=1)


def sparse(rank: int, world_size: int) -> float:
    model = wrap(Words(), weight="samples")
    words = [torch.arange(3 + 4 * r) % 40 for r in range(world_size)]
    model(words[rank]).mean().backward()
    whole = Words()
    whole(torch.cat(words)).mean().backward()
    mine, right = model.module.table.weight.grad, whole.table.weight.grad
    assert mine is not None
    assert right is not None
    return float((mine.to_dense() - right.to_dense()).abs().max())


def test_sparse_gradients() -> None:
    found = ranks.run_ranks(2, sparse, timeout_s=60, preload=ranks.TORCH_DDP)
    assert all(off < 1e-15 for off in found.values())


def test_samples_are_counted_by_the_first_dimension() -> None:
    from pycomm.ddp.weights import add_first_dimensions, count_samples

    batch, labels = torch.zeros(5, 9), torch.zeros(5, dtype=torch.long)
    scalar = torch.tensor(3.0)
    assert count_samples((batch,), {})[0] == 5
    assert count_samples((scalar, {"x": [batch, scalar]}), {"labels": labels})[0] == 5
    assert count_samples((), {"input_ids": batch})[0] == 5
    number, how = count_samples(((0, {"image": batch}),), {})
    assert number == 5
    assert "argument 0[1]['image'], of the shape [5, 9]" in how
    for args in ((batch,), (scalar, {"x": [batch, scalar]}), ((0, "text", {"y": (labels, None)}),)):
        sizes: set[int] = set()
        add_first_dimensions(args, sizes)
        assert sizes == {count_samples(args, {})[0]} == {5}
    for args in ((batch, batch.T), (batch, pack(4, 3))):
        sizes = set()
        add_first_dimensions(args, sizes)
        assert len(sizes) == 2
        with pytest.raises(ValueError, match=r"cannot tell .*model\.samples = n"):
            count_samples(args, {})
    for args in ((), (scalar,), ("text",)):
        with pytest.raises(ValueError, match=r"found no tensor .*model\.samples = n"):
            count_samples(args, {})


def pack(*lengths: int) -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_sequence([torch.zeros(each, 2) for each in lengths])


@pytest.mark.parametrize("lengths", [(7,), (3, 2), (1, 1, 1), (9, 2, 2, 1)])
def test_packed_sequences_count_each_as_one(lengths: tuple[int, ...]) -> None:
    from pycomm.ddp.weights import add_first_dimensions, count_samples

    for args in ((pack(*lengths),), ({"x": [pack(*lengths)]}, torch.zeros(len(lengths), 3))):
        sizes: set[int] = set()
        add_first_dimensions(args, sizes)
        assert sizes == {len(lengths)}
        number, how = count_samples(args, {})
        assert number == len(lengths)
    _, how = count_samples((pack(*lengths),), {})
    assert how == f"by argument 0, {len(lengths)} packed sequences"


def beside_a_norm(rank: int, world_size: int) -> bool:
    """Rank 1 has all weights before the last layer's buckets are full, and rank 0 has not."""
    import pycomm

    net = nn.Sequential(nn.Linear(9, 8), pycomm.SyncBatchNorm(8), nn.Linear(8, 4096))
    model = wrap(net, weight="samples", bucket_cap_mb=0.01)
    output = model(batch_of(rank, 0, 4 + rank, torch.float32))
    if rank == 1:
        output.register_hook(lambda _: time.sleep(0.2))
        net[2].weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.2))
    output.square().sum().backward()
    return same_everywhere(gradients(model))


def test_buckets_do_not_pass_the_sums_of_a_norm_that_are_in_backward() -> None:
    found = ranks.run_ranks(2, beside_a_norm, timeout_s=60, preload=ranks.TORCH_DDP)
    assert found.values() == [True, True]


class WithNorm(nn.Module):
    def __init__(self) -> None:
        import pycomm

        super().__init__()
        self.norm = pycomm.SyncBatchNorm(9)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(batch)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def tried(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    tried("value", lambda: wrap(Net(torch.float32), weight="tokens"))
    plain = wrap(Net(torch.float32))
    tried("plain samples", lambda: setattr(plain, "samples", 3))
    tried("plain no_batch", plain.no_batch)
    model = wrap(Net(torch.float32), weight="samples")
    for bad in (-1, math.inf, math.nan, "3", True):
        tried(f"samples {bad}", lambda bad=bad: setattr(model, "samples", bad))
    tried("no_batch and BatchNorm", lambda: wrap(WithNorm(), weight="samples").no_batch())
    tried(
        "log and sync_every",
        lambda: wrap(Net(torch.float32), weight="samples", sync_every=2).step_log,
    )
    tried("join", lambda: model.join().__enter__())
    return found


def test_what_cannot_be_is_refused_by_name() -> None:
    (found, other) = ranks.run_ranks(2, refusals, timeout_s=60, preload=ranks.TORCH_DDP).values()
    assert found == other
    assert found["value"].startswith("ValueError: weight='tokens'")
    assert found["plain samples"].startswith("UnsupportedError: model.samples needs")
    assert found["plain no_batch"].startswith("UnsupportedError: no_batch() needs")
    for bad in ("-1", "inf", "nan", "3", "True"):
        assert "is neither 0 nor a number from 1e-20" in found[f"samples {bad}"]
    assert "no_batch()" in found["join"]
    assert "SyncBatchNorm of the other ranks waits" in found["no_batch and BatchNorm"]
    assert "BalancedSampler cannot follow" in found["log and sync_every"]


def differs(rank: int, world_size: int) -> str:
    try:
        wrap(Net(torch.float32), weight="samples" if rank == 0 else None)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_ranks_that_differ_in_weight_are_named() -> None:
    found = ranks.run_ranks(2, differs, timeout_s=60, preload=ranks.TORCH_DDP)
    assert all("weight" in text and "samples" in text for text in found.values())
