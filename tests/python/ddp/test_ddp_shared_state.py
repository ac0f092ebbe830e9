"""Scales, order and counts are the same on all ranks after a change of ranks, or raise an error."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import Layers, all_ranks, step, wrap
from torch import nn
from training_models import Broken

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]


def mean_hook(state: Any, bucket: Any) -> Any:
    """Over the group that its program has put into the state."""
    group = state["group"]
    mean = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(mean, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


mean_hook.__annotations__.clear()  # torch compares them, and here they are strings


def wrap_over(group: Any, options: dict[str, Any], state: dict[str, Any]) -> Any:
    """In two buckets, with ``mean_hook`` if the options say so."""
    options = dict(options)
    hooks = options.pop("hook", False)
    model = wrap(Layers(), process_group=group, bucket_cap_mb=0.004, **options)
    state["group"] = group
    if hooks:
        model.register_comm_hook(state, mean_hook)
    return model


def newcomer(rank: int, world_size: int, options: dict[str, Any]) -> list[list[float]]:
    """Ranks 0 and 1 have trained; rank 2 has just made its wrapper; all meet in one group."""
    pair = dist.new_group([0, 1])
    alone = dist.new_group([2])
    state: dict[str, Any] = {}
    model = wrap_over(alone if rank == 2 else pair, options, state)
    if rank < 2:
        for _ in range(3):
            step(model, 30.0)
    state["group"] = dist.group.WORLD
    model._update_process_group(dist.group.WORLD)
    return [step(model, 0.001 * (1 + rank)) for _ in range(3)]


@pytest.mark.parametrize(
    "options",
    [
        *({"wire_dtype": "fp16"}, {}, {"static_graph": True}, {"hook": True}),
        *(rings.nightly({"wire_dtype": wire}) for wire in ("bf16", "int8")),
    ],
    ids=["fp16", "own", "static_graph", "hook", "bf16", "int8"],
)
def test_a_newcomer_and_ranks_that_have_trained_average_alike(options: dict[str, Any]) -> None:
    found = ranks.run_ranks(
        3,
        newcomer,
        args=(options,),
        timeout_s=100,
        init_timeout_s=20.0,
        preload=ranks.TORCH_DDP,
    ).values()
    first = found[0]
    assert all(each == first for each in found)
    assert [gradient for each in first for gradient in each] == pytest.approx([0.002] * 6, rel=0.01)


def failed_between_commits(
    rank: int, world_size: int, where: str, options: dict[str, Any]
) -> list[list[float]]:
    """Gradients grow, so scales change, though not so much that fp16 sends a bucket again; rank 1's
    pass raises; then both ranks meet in another group.
    """
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    group = dist.new_group([0, 1])
    state: dict[str, Any] = {}
    model = wrap_over(group, options, state)
    for _ in range(3):
        step(model, 0.03)
    model.zero_grad()
    if rank == 1:
        batch = torch.full((1,), 0.24)
        handles = []
        if where == "behind the last bucket":
            batch = Broken.apply(batch.requires_grad_())  # type: ignore[no-untyped-call]
        else:
            handles = raise_at_the_second(model)
        with pytest.raises(ArithmeticError):
            model(batch).backward()
        for each in handles:
            each.remove()
        if where == "behind the last bucket":
            store.wait(["committed"], timedelta(seconds=60))
        dist.destroy_process_group(group)
    elif where == "behind the last bucket":
        step(model, 0.24)
        store.set("committed", "")
    else:
        with pytest.raises(Exception, match="Rank 1"):
            step(model, 0.24)
    state["group"] = dist.new_group([0, 1])
    model._update_process_group(state["group"])
    return [step(model, 0.008) for _ in range(3)]


def raise_at_the_second(model: Any) -> list[Any]:
    """The gradient of one parameter arrives, that of the other one does not."""
    came = []

    def hook(gradient: torch.Tensor) -> None:
        came.append(gradient)
        if len(came) == 2:
            raise ArithmeticError

    return [each.register_hook(hook) for each in model.parameters()]


@pytest.mark.parametrize("where", ["between two buckets", "behind the last bucket"])
@pytest.mark.parametrize(
    "options",
    [
        *({"wire_dtype": "fp16"}, {}, {"hook": True}),
        *(rings.nightly(each) for each in ({"wire_dtype": "bf16"}, {"wire_dtype": "int8"})),
    ],
    ids=["fp16", "own", "hook", "bf16", "int8"],
)
def test_ranks_of_which_one_has_committed_a_pass_average_alike_in_another_group(
    where: str, options: dict[str, Any]
) -> None:
    found = ranks.run_ranks(
        2,
        failed_between_commits,
        args=(where, options),
        timeout_s=100,
        init_timeout_s=20.0,
        preload=ranks.TORCH_DDP,
    ).values()
    assert found[0] == found[1]
    assert [gradient for each in found[0] for gradient in each] == pytest.approx(
        [0.008] * 6, rel=0.01
    )


def scale_forgotten(model: Any) -> None:
    model.reducer._reset_state()


def passes_loaded(model: Any) -> None:
    model.load_communication_state_dict({**model.communication_state_dict(), "accumulated": 1})


class Rows(nn.Module):
    """Its only gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, sparse=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.table(torch.tensor([0, 3])) * batch).sum()


def sum_hook(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def late_sum_hook(state: Any, bucket: Any) -> Any:
    """The sum is issued in a callback of another operation."""
    work = dist.barrier(async_op=True)
    assert work is not None
    total = bucket.buffer()
    return work.get_future().then(lambda _: dist.all_reduce(total) or total)


for each in (sum_hook, late_sum_hook):
    each.__annotations__.clear()  # torch compares them, and here they are strings


def updated_alone(
    rank: int, world_size: int, change: Any, options: dict[str, Any], kind: Any
) -> str:
    """Rank 1 alone changes its state, with the store of a group that replaced the first one."""
    import pycomm

    model = wrap(Rows() if kind is Rows else Layers(), bucket_cap_mb=0.004, **options)
    if kind in (sum_hook, late_sum_hook):
        model.register_comm_hook(None, kind)
    if kind == "ordered":
        model.register_comm_hook(None, pycomm.comm_hooks.ordered(sum_hook))
    model._update_process_group(dist.new_group([0, 1]))
    for _ in range(4):
        step(model, 0.03)
    if rank == 1:
        change(model)
    with pytest.raises(Exception) as caught:
        for _ in range(4):
            found = step(model, 0.03)
        raise AssertionError(f"no error, and gradients {found}")
    with pytest.raises(RuntimeError, match="earlier backward pass failed") as later:
        step(model, 0.03)
    return f"{caught.value} {getattr(caught.value, '__notes__', '')} {later.value}"


@pytest.mark.parametrize(
    ("change", "options", "kind", "part"),
    [
        (scale_forgotten, {"wire_dtype": "fp16"}, Layers, "the fp16 scales, "),
        (scale_forgotten, {}, Layers, "whether that order has been agreed on"),
        (passes_loaded, {"accumulate": 4}, Layers, "the number of passes"),
        rings.nightly((passes_loaded, {"accumulate": 4}, Rows, "the number of passes")),
        rings.nightly((passes_loaded, {"accumulate": 4}, sum_hook, "the number of passes")),
        (passes_loaded, {"accumulate": 4}, "ordered", "the number of passes"),
        (passes_loaded, {"accumulate": 4}, late_sum_hook, "the number of passes"),
    ],
    ids=[
        *("scales", "order", "passes", "passes-sparse", "passes-hook", "passes-ordered"),
        "passes-callback",
    ],
)
def test_ranks_that_do_not_share_their_state_get_an_error_that_names_the_part(
    change: Any, options: dict[str, Any], kind: Any, part: str
) -> None:
    found = ranks.run_ranks(
        2,
        updated_alone,
        args=(change, options, kind),
        timeout_s=100,
        init_timeout_s=20.0,
        check=False,
    )
    for rank in range(2):
        assert "COLLECTIVE_MISMATCH" in found[rank].value
        assert f"the reducers of rank {rank} and rank {1 - rank} differ in" in found[rank].value
        assert part in found[rank].value


def loaded_alone(
    rank: int, world_size: int, ranks_that_load: list[int], buffers: bool, steps: int
) -> str:
    """A run is resumed, and only some ranks load the wrapper's state: the order of its buckets."""
    first = wrap(Layers(), bucket_cap_mb=0.004)
    for _ in range(3):
        step(first, 0.03)
    state = first.communication_state_dict()
    module = Layers()
    if buffers:
        module.register_buffer("steps", torch.zeros(1))
    model = wrap(module, bucket_cap_mb=0.004)
    for _ in range(steps):
        step(model, 0.03)
    if rank in ranks_that_load:
        model.load_communication_state_dict(state)
    with pytest.raises(Exception) as caught:
        for _ in range(3):
            found = step(model, 0.03)
        raise AssertionError(f"no error, and gradients {found}")
    return f"{caught.value} {getattr(caught.value, '__notes__', '')}"


@pytest.mark.parametrize("ranks_that_load", [[0], [1]])
@pytest.mark.parametrize("buffers", rings.first_of([False, True]))
@pytest.mark.parametrize("steps", rings.first_of([0, 1]))
def test_a_state_loaded_on_some_ranks_only_is_named(
    ranks_that_load: list[int], buffers: bool, steps: int
) -> None:
    found = ranks.run_ranks(
        2,
        loaded_alone,
        args=(ranks_that_load, buffers, steps),
        timeout_s=100,
        init_timeout_s=20.0,
        check=False,
    )
    for rank in range(2):
        said = found[rank].value
        assert "COLLECTIVE_MISMATCH" in said
        assert f"the reducers of rank {rank} and rank {1 - rank} differ in" in said, said
        assert "whether that order has been agreed on" in said, said


class FarStore(dist.Store):  # type: ignore[misc]
    """A store some milliseconds away. `silent`: what this rank reports does not arrive."""

    def __init__(self, store: Any, silent: bool) -> None:
        super().__init__()
        self.store, self.silent = store, silent
        self.awaited = threading.Event()

    def set(self, key: str, value: Any) -> None:
        if not (self.silent and key.startswith("parts/")):
            self.store.set(key, value)

    def get(self, key: str) -> Any:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.005)
        if keys[0].startswith("parts/"):
            self.awaited.set()
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self.awaited.set()
        time.sleep(0.005)
        if timeout < timedelta(seconds=0.005):
            raise RuntimeError("the store's answer came too late")
        self.store.wait(keys, timeout)


def one_reports_nothing(rank: int, world_size: int) -> str:
    """Rank 2 differs from rank 0. Rank 1 does not report, so rank 0 waits for it as long as it may.

    Meanwhile another thread asks the wrapper something that needs its turn. Rank 2 reports when
    that of rank 0 has been answered.
    """
    model = wrap(Layers(), bucket_cap_mb=0.004)
    for _ in range(3):
        step(model, 0.03)
    shared = dist.PrefixStore("far", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    store = FarStore(shared, silent=rank == 1)
    model.reducer.share_store(store)
    if rank == 2:
        time.sleep(0.5)
        model.reducer._reset_state()
        store.silent = False
        publish = store.set

        def set_later(*args: Any) -> None:
            shared.wait(["answered"], timedelta(seconds=2.5))  # rank 0 waits for three
            publish(*args)

        store.set = set_later  # type: ignore[method-assign]
    answers: list[bool] = []

    def ask() -> None:
        if store.awaited.wait(60):
            with pytest.raises(RuntimeError, match="earlier backward pass failed"):
                model.reducer.prepare_for_forward()
            answers.append(True)
            if rank == 0:
                shared.set("answered", "")

    asks = threading.Thread(target=ask)
    asks.start()
    with pytest.raises(Exception) as caught:
        for _ in range(4):
            step(model, 0.03)
        raise AssertionError("no error")
    asks.join()
    assert answers
    return f"{caught.value} {getattr(caught.value, '__notes__', '')}"


def test_a_rank_that_reports_nothing_takes_neither_the_others_time_nor_the_turn() -> None:
    found = ranks.run_ranks(3, one_reports_nothing, timeout_s=100, init_timeout_s=20.0, check=False)
    for rank, differs in ((0, 2), (2, 0)):
        said = found[rank].value
        assert f"the reducers of rank {rank} and rank {differs} differ in" in said, said


def frozen_before_join(rank: int, world_size: int) -> list[float]:
    model = wrap(Layers())
    step(model, 1.0)
    model.module.first.requires_grad_(False)
    with model.join(divide_by_initial_world_size=False):
        for number in range(2 if rank == 0 else 0):
            step(model, 1.0 + number)
    return [float(each) for each in all_ranks(model.module.last.grad[:1])]


def test_ranks_without_data_cut_buckets_as_the_others_do() -> None:
    found = ranks.run_ranks(
        2, frozen_before_join, timeout_s=100, init_timeout_s=20.0, preload=ranks.TORCH_DDP
    )
    assert found[0].value[0] == 2.0


PAST, PAST_ONE, RAISED = "past the wrapper", "past rank 0's", "raised in no_sync"


def counted_after(rank: int, world_size: int, first: str) -> list[list[float]]:
    """A backward call that is no first pass comes before the first pass of a static graph."""
    model = wrap(Layers(), static_graph=True, bucket_cap_mb=0.004)
    if first == RAISED:
        handle = model.module.last.register_hook(fails)
        with model.no_sync():
            loss = model(torch.ones(1))
        with pytest.raises(ArithmeticError):
            loss.backward()
        handle.remove()
    elif first == PAST or rank == 0:
        model.module(torch.ones(1)).backward()
    return [step(model, 1.0 + 2 * rank) for _ in range(3)]


def fails(grad: torch.Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("first", [PAST, PAST_ONE, RAISED])
def test_the_first_pass_of_a_static_graph_counts_its_own_gradients_alone(first: str) -> None:
    found = ranks.run_ranks(
        2,
        counted_after,
        args=(first,),
        timeout_s=60,
        init_timeout_s=20.0,
        preload=ranks.TORCH_DDP,
    )
    assert found.values() == [[[2.0, 2.0]] * 3] * 2


def counted_in_join(rank: int, world_size: int, accumulate: int) -> list[list[float]]:
    """A rank has no batch while the other counts the gradients of a static graph, and then has."""
    options: dict[str, Any] = {"accumulate": accumulate} if accumulate > 1 else {}
    model = wrap(Layers(), static_graph=True, bucket_cap_mb=0.004, **options)
    for has in (0, 1):
        with model.join(divide_by_initial_world_size=False):
            for _ in range(4 if rank == has else 0):
                step(model, 2.0)
    found = []
    for _ in range(accumulate):
        found = step(model, 1.0 + 2 * rank)
    return [found, [float(each) for each in all_ranks(model.module.last.grad[:1])]]


@pytest.mark.parametrize("accumulate", rings.first_of([2, 1]))
def test_a_rank_without_data_counts_a_static_graph_later(accumulate: int) -> None:
    found = ranks.run_ranks(
        2,
        counted_in_join,
        args=(accumulate,),
        timeout_s=100,
        init_timeout_s=20.0,
        preload=ranks.TORCH_DDP,
    )
    for each in found.values():
        assert each == [[2.0, 2.0], [2.0, 2.0]]
