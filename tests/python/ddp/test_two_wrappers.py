"""One backward pass goes through two wrappers, in an order that may differ between ranks."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import wrap
from elastic_rig import Net, announce, await_ranks, batch_of
from signals import interrupt_main_thread
from time_bound import assert_within
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_wrappers import Kind, Program, Training, random_program

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

KINDS = {
    "plain": Kind(),
    "samples": Kind(weight=True),
    "fp16": Kind(wire="fp16"),
    "elastic": Kind(elastic=True),
    "elastic, samples": Kind(elastic=True, weight=True),
    "elastic, int8": Kind(elastic=True, wire="int8"),
    "elastic, static graph": Kind(elastic=True, static=True),
    "elastic, reentrant": Kind(elastic=True, reentrant=True),
    "static graph, samples": Kind(static=True, weight=True),
}


def trains(rank: int, world_size: int, programs: list[Program]) -> list[str]:
    wrong = []
    for program in programs:
        wrong.append(Training(rank, world_size, program).run())
    return [each for each in wrong if each]


@pytest.mark.parametrize("name", rings.first_of(list(KINDS), 4))
def test_the_graph_reaches_them_in_another_order_on_each_rank(name: str) -> None:
    kind = KINDS[name]
    program = Program(1, (kind, kind), True, (("joined", 0),) * 6)
    found = ranks.run_ranks(3, trains, args=([program],), timeout_s=40, preload=ranks.TORCH_DDP)
    assert found.values() == [[], [], []]


@pytest.mark.parametrize("seeds", rings.first_of([range(10), range(10, 50)]), ids=str)
def test_random_programs(seeds: range) -> None:
    programs = [random_program(seed) for seed in seeds]
    found = ranks.run_ranks(2, trains, args=(programs,), timeout_s=200, preload=ranks.TORCH_DDP)
    assert found.values() == [[], []]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("own_groups", [False, True])
def test_a_rank_without_a_batch_stands_in_for_one_pass_through_both(
    own_groups: bool, elastic: bool
) -> None:
    kind = Kind(weight=True, elastic=elastic)
    program = Program(2, (kind, kind), own_groups or elastic, (("without a batch", 0),) * 7)
    found = ranks.run_ranks(3, trains, args=([program],), timeout_s=40, preload=ranks.TORCH_DDP)
    assert found.values() == [[], [], []]


def without_a_batch(rank: int, world_size: int, own_groups: bool, made_first: int) -> bool:
    """With buffers, which each forward pass broadcasts; one of the two is called twice."""
    import pycomm

    groups = [dist.new_group() if own_groups else None for _ in range(2)]
    models = [wrap(Net(), weight="samples", process_group=group) for group in groups]
    first, second = models[made_first], models[1 - made_first]
    same = True
    for step in range(6):
        for model in models:
            model.zero_grad()
        if rank == step % 3:
            pycomm.no_batch(first, second, second)
        else:
            losses = [
                model(batch_of(rank, step)).square().mean() for model in (first, second, second)
            ]
            sum(losses).backward()
        for model in models:
            grad = model.module.wide.weight.grad
            gathered = [torch.empty_like(grad) for _ in range(world_size)]
            dist.all_gather(gathered, grad)
            same = same and all(torch.equal(each, grad) for each in gathered)
            same = same and float(grad.abs().sum()) > 0
    return same


@pytest.mark.parametrize("made_first", [0, 1])
@pytest.mark.parametrize("own_groups", [False, True])
def test_it_takes_part_in_what_forward_passes_exchange(own_groups: bool, made_first: int) -> None:
    found = ranks.run_ranks(
        3, without_a_batch, args=(own_groups, made_first), timeout_s=60, preload=ranks.TORCH_DDP
    )
    assert found.values() == [True, True, True]


def beside_a_frozen_one(rank: int, world_size: int, set_to_none: bool) -> list[int]:
    """A generator's step through a discriminator that is frozen, and then one of that."""
    import pycomm

    models = [wrap(nn.Linear(4, 4), weight="samples") for _ in range(2)]
    batch = torch.ones(2 + rank, 4)
    for _ in range(3):
        for model in models:
            model.zero_grad(set_to_none=set_to_none)
        models[1].module.requires_grad_(False)
        if rank == 1:
            pycomm.no_batch(*models)
        else:
            models[1](models[0](batch)).mean().backward()
        models[1].module.requires_grad_(True)
        models[1](batch).mean().backward()
    return [record.batches for record in models[1].step_log.records(0)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_pass_through_a_frozen_one_does_not_count(set_to_none: bool) -> None:
    found = ranks.run_ranks(
        2, beside_a_frozen_one, args=(set_to_none,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    assert found.values() == [[1, 1, 1]] * 2


def one_at_a_time(rank: int, world_size: int, what: str) -> str:
    """Rank 1 has no batch, and says it of each wrapper alone, or of one forward pass of two."""
    models = [wrap(Net(), weight="samples") for _ in range(2)]
    forwards = [models[0]] * 2 if what == "one of two forward passes" else models
    for step in range(3):
        try:
            if rank == 1 and step > 0:
                for model in dict.fromkeys(forwards):
                    model.no_batch()
            else:
                sum(model(batch_of(rank, step)).square().mean() for model in forwards).backward()
        except Exception as error:
            return "\n".join([repr(error), *getattr(error, "__notes__", [])])
    return "nothing raised"


@pytest.mark.parametrize("what", ["each of two wrappers", "one of two forward passes"])
def test_a_no_batch_for_each_is_an_error_that_says_what_to_call(what: str) -> None:
    found = ranks.run_ranks(2, one_at_a_time, args=(what,), timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "CollectiveMismatchError" in text
        assert "pycomm.no_batch(first, second, ...)" in text


WAITS_AT_MOST_S = 20.0


def beside_a_nested_one(
    rank: int, world_size: int, own_groups: bool, made_first: int
) -> tuple[str, float]:
    """Rank 1 has no batch; on the others the second one's pass is in a nested call."""
    import pycomm

    models = [
        wrap(
            nn.Linear(4, 4),
            weight="samples",
            process_group=dist.new_group(timeout=timedelta(seconds=WAITS_AT_MOST_S))
            if own_groups
            else None,
        )
        for _ in range(2)
    ]
    outer, inner = models[made_first], models[1 - made_first]
    began_s = time.monotonic()
    try:
        for step in range(3):
            given = torch.ones(2 + rank, 4, requires_grad=True)
            if rank == 1 and step == 2:  # when buckets have their order
                pycomm.no_batch(inner, outer)
            else:
                outer(checkpoint(inner, given, use_reentrant=True)).mean().backward()
        text = ""
    except Exception as error:
        text = "\n".join([repr(error), *getattr(error, "__notes__", [])])
    return text, time.monotonic() - began_s


@pytest.mark.time_bound
@pytest.mark.parametrize("own_groups", [False, True])
def test_a_rank_without_a_batch_cannot_end_a_nested_pass_before_an_earlier_wrapper(
    own_groups: bool,
) -> None:
    found = ranks.run_ranks(
        3,
        beside_a_nested_one,
        args=(own_groups, 0),
        init_timeout_s=WAITS_AT_MOST_S,
        timeout_s=60,
        preload=ranks.TORCH_DDP,
    )
    for text, took_s in found.values():
        assert "use_reentrant" in text
        assert_within(took_s, WAITS_AT_MOST_S / 2)


@pytest.mark.parametrize("own_groups", [False, True])
def test_it_ends_a_nested_pass_in_turn(own_groups: bool) -> None:
    found = ranks.run_ranks(
        3, beside_a_nested_one, args=(own_groups, 1), timeout_s=60, preload=ranks.TORCH_DDP
    )
    assert [text for text, _ in found.values()] == [""] * 3


def test_no_batch_of_something_else_is_refused() -> None:
    import pycomm

    for wrappers in ((), (nn.Linear(1, 1),)):
        with pytest.raises(TypeError, match="takes the wrappers whose forward"):
            pycomm.no_batch(*wrappers)


def weightable(which: int) -> Net:
    """Each of the two has other parameters."""
    net = Net()
    net.norm.eval()  # else a batch's mean would be of its own rank alone
    with torch.no_grad():
        for each in net.parameters():
            each.mul_(1 + which)
    return net


def batch(rank: int, step: int, which: int) -> torch.Tensor:
    """Of another size on each rank, in each step, and for each of the two."""
    return batch_of(rank, 2 * step + which, 2 + (rank + 1) * (2 + which) + step)


def assert_weighed(model: Any, which: int, step: int, world_size: int) -> None:
    """Its gradients are those of all ranks' samples in one batch, in float64."""
    alone = copy.deepcopy(model.module).double()
    alone.zero_grad()
    whole = torch.cat([batch(rank, step, which) for rank in range(world_size)])
    alone(whole.double()).square().mean().backward()
    for mine, exact in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def jittered(rank: int, world_size: int) -> None:
    """Two weighed wrappers of one group, whose weights come at another moment on each rank."""
    models = [wrap(weightable(which), weight="samples", bucket_cap_mb=0.002) for which in (0, 1)]
    late = [False]
    # The second one's gradients come first.
    models[1].module.left.bias.register_hook(lambda _: time.sleep(0.03 if late[0] else 0.0))
    for step in range(6):
        late[0] = (rank + step) % 2 == 0
        for model in models:
            model.zero_grad()
        losses = [
            model(batch(rank, step, which)).square().mean() for which, model in enumerate(models)
        ]
        (losses[0] + losses[1]).backward()
        for which, model in enumerate(models):
            assert_weighed(model, which, step, world_size)


def test_weighed_wrappers_may_share_a_group() -> None:
    ranks.run_ranks(2, jittered, timeout_s=60, preload=ranks.TORCH_DDP).check()


def crossed(rank: int, world_size: int) -> str:
    """Of one group, and in another order on each rank."""
    models = [wrap(Net()) for _ in range(2)]
    order = models if rank else models[::-1]
    losses = [model(batch_of(rank, 0)).square().mean() for model in order]
    try:
        (losses[0] + losses[1]).backward()
    except Exception as error:
        return "\n".join([repr(error), *getattr(error, "__notes__", [])])
    return "nothing raised"


def test_another_order_in_one_group_is_an_error_that_says_so() -> None:
    found = ranks.run_ranks(2, crossed, timeout_s=60, preload=ranks.TORCH_DDP)
    for text in found.values():
        assert "CollectiveMismatchError" in text
        assert "another DistributedDataParallel wrapper of this process" in text


def weightless(rank: int, world_size: int) -> None:
    """One of the two has a step without samples; the other one's step counts, and both go on."""
    models = [
        wrap(weightable(which), weight="samples", process_group=dist.new_group())
        for which in (0, 1)
    ]
    for step in range(4):
        for model in models:
            model.zero_grad()
        if step in (1, 2):
            models[step % 2].samples = 0
        losses = [
            model(batch(rank, step, which)).square().mean() for which, model in enumerate(models)
        ]
        if step in (1, 2):
            with pytest.raises(ValueError, match="no rank has any samples in this step"):
                (losses[0] + losses[1]).backward()
        else:
            (losses[0] + losses[1]).backward()
        for which in {1 - step % 2} if step in (1, 2) else {0, 1}:
            assert_weighed(models[which], which, step, world_size)


def test_a_step_without_samples_of_one_leaves_the_other_its_step() -> None:
    ranks.run_ranks(2, weightless, timeout_s=60, preload=ranks.TORCH_DDP).check()


def beside_a_penalty(rank: int, world_size: int) -> list[float]:
    """One of the two begins with the end of the call, which its graph reaches at another time."""
    import pycomm

    models = [wrap(Net(), elastic=pycomm.Elastic()) for _ in range(2)]
    found = []
    for step in range(4):
        for model in models:
            model.zero_grad()
        models[0](batch_of(rank, step))
        terms = [
            lambda: models[1](batch_of(rank, step)).square().mean(),  # noqa: B023
            lambda: sum(each.square().sum() for each in models[0].module.parameters()),
        ]
        losses = [term() for term in (terms if (rank + step) % 2 else terms[::-1])]
        (losses[0] + losses[1]).backward()
        found += [float(model.module.wide.weight.grad.double().sum()) for model in models]
    return found


def test_one_that_begins_with_the_end_of_the_call_ends_in_its_turn() -> None:
    found = ranks.run_ranks(2, beside_a_penalty, timeout_s=60, preload=ranks.TORCH_DDP)
    one, two = found.values()
    assert one == two


WAITS_S = 8.0


def one_fails(rank: int, world_size: int) -> Any:
    """Rank 1 alone fails in the end of the first wrapper, where it waits for the others."""
    import signal

    import pycomm

    def raise_alarm(*_: object) -> None:
        raise InterruptedError

    models = [wrap(Net(), elastic=pycomm.Elastic()) for _ in range(2)]
    begun = threading.Event()
    took_s = 0.0
    for step in range(3):
        for model in models:
            model.zero_grad()
        losses = [model(batch_of(rank, step)).square().mean() for model in models]
        if rank == 1 and step == 1:
            signal.signal(signal.SIGALRM, raise_alarm)
            models[0].module.wide.weight.register_hook(lambda _: begun.set())
            interrupt_main_thread(signal.SIGALRM, begun)
            with pytest.raises(InterruptedError):
                (losses[0] + losses[1]).backward()
            announce("failed", rank)
            time.sleep(WAITS_S)
            return None
        if step == 1:
            await_ranks("failed", [1])
        began_s = time.monotonic()
        (losses[0] + losses[1]).backward()
        took_s = max(took_s, time.monotonic() - began_s)
    return [model.elastic.members for model in models], took_s


@pytest.mark.time_bound
def test_a_rank_that_fails_in_one_leaves_both() -> None:
    found = ranks.run_ranks(3, one_fails, timeout_s=60, preload=ranks.TORCH_DDP)
    for members, _ in (found[0].value, found[2].value):
        assert members == [(0, 2), (0, 2)]
    assert_within(max(found[0].value[1], found[2].value[1]), WAITS_S / 2)


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.head = trunk, nn.Linear(30, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.trunk(batch)))
        return out


def share_a_trunk(rank: int, world_size: int, elastic: bool) -> str:
    """Two wrappers of one layer: a pass for each, in both orders, and then one through both."""
    import pycomm

    torch.manual_seed(1)
    trunk = nn.Linear(20, 30)
    nets = [Headed(trunk, seed) for seed in (2, 3)]
    models = [
        wrap(net, elastic=pycomm.Elastic() if elastic else None, process_group=dist.new_group())
        for net in nets
    ]
    for step in range(4):
        alone = copy.deepcopy(nets)
        for net in (*nets, *alone):
            net.zero_grad()
        losses = [model(batch_of(rank, step)).square().mean() for model in models]
        for which in (0, 1) if step % 2 else (1, 0):
            losses[which].backward()
        for net in alone:
            for each in range(world_size):
                (
                    net.double()(batch_of(each, step).double()).square().mean() / world_size
                ).backward()
        for ours, theirs in zip(nets, alone, strict=True):
            for mine, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    losses = [model(batch_of(rank, 9)).square().mean() for model in models]
    with pytest.raises(RuntimeError) as caught:
        (losses[0] + losses[1]).backward()
    return str(caught.value)


@pytest.mark.parametrize("elastic", [False, True])
def test_one_pass_through_two_wrappers_of_a_layer_is_refused(elastic: bool) -> None:
    found = ranks.run_ranks(
        2, share_a_trunk, args=(elastic,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    for text in found.values():
        assert "parameter 'trunk." in text
        assert "belongs to two DistributedDataParallel wrappers" in text


class Result:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class InAnObject(Headed):
    def forward(self, batch: torch.Tensor) -> Any:
        return Result(super().forward(batch))


class WithoutTrunk(Headed):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(batch.repeat(1, 2)[:, :30])
        return out


def reached_otherwise(rank: int, world_size: int, kinds: list[type[Headed]]) -> str:
    torch.manual_seed(1)
    trunk = nn.Linear(20, 30)
    models = [
        wrap(kind(trunk, seed), find_unused_parameters=kind is WithoutTrunk)
        for seed, kind in enumerate(kinds)
    ]
    found = [model(batch_of(rank, 0)) for model in models]
    outputs = [each.value if isinstance(each, Result) else each for each in found]
    with pytest.raises(RuntimeError) as caught:
        (outputs[0].square().mean() + outputs[1].square().mean()).backward()
    return str(caught.value)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([Headed, InAnObject], id="the second one's pass begins without a mark"),
        pytest.param([InAnObject, Headed], id="the first one's pass begins without a mark"),
        pytest.param([InAnObject, InAnObject], id="both passes begin without a mark"),
        pytest.param([WithoutTrunk, Headed], id="the trunk's gradient comes before the first mark"),
    ],
)
def test_so_is_one_that_reaches_them_in_another_way(kinds: list[type[Headed]]) -> None:
    found = ranks.run_ranks(
        2, reached_otherwise, args=(kinds,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    for text in found.values():
        assert "parameter 'trunk." in text
        assert "belongs to two DistributedDataParallel wrappers" in text


def on_threads(rank: int, world_size: int, elastic: bool) -> None:
    """Each thread trains a wrapper of its own, and deletes it at last."""
    import pycomm

    models: list[Any] = [
        wrap(
            weightable(which),
            elastic=pycomm.Elastic() if elastic else None,
            weight="samples",
            process_group=dist.new_group(),
        )
        for which in (0, 1)
    ]
    errors: list[BaseException] = []

    def train(which: int) -> None:
        try:
            for step in range(20):
                models[which].zero_grad()
                models[which](batch(rank, step, which)).square().mean().backward()
                assert_weighed(models[which], which, step, world_size)
            models[which] = None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("elastic", [False, True])
def test_each_thread_trains_one(elastic: bool) -> None:
    found = ranks.run_ranks(2, on_threads, args=(elastic,), timeout_s=60, preload=ranks.TORCH_DDP)
    found.check()
