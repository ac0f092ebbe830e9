"""``model.samples``: which backward pass it is of, and what ends it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def make_model(**options: Any) -> Any:
    torch.manual_seed(7)
    return wrap(nn.Linear(3, 2, dtype=torch.float64), weight="samples", **options)


def batch_of(samples: int) -> torch.Tensor:
    return torch.ones(samples, 3, dtype=torch.float64)


def counted(model: Any) -> float:
    """How much this rank has counted in the last step."""
    (record,) = model.step_log.records(model.step_log.steps - 1)
    return float(record.samples[model.step_log.rank])


def beside_other_forwards(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = make_model()
    loss = model(batch_of(4)).mean()
    model.samples = 50
    model(batch_of(1))  # its graph is dropped
    loss.backward()
    found["another forward before backward"] = counted(model)
    found["and then"] = model.samples

    loss = model(batch_of(4)).mean()
    model.samples = 60
    loss.backward(retain_graph=True)
    first = counted(model)
    loss.backward()
    found["twice through one graph"] = [first, counted(model)]

    first, second = model(batch_of(2)).mean(), model(batch_of(3)).mean()
    model.samples = 70
    first.backward()
    second.backward()
    found["an older graph before it"] = counted(model)

    first = model(batch_of(2)).mean()
    model.samples = 80
    second = model(batch_of(3)).mean()
    first.backward()
    found["between two forwards"] = counted(model)
    try:
        second.backward()
    except RuntimeError as error:
        found["and the second"] = str(error)

    model = make_model()
    model.samples = 90
    first, second = model(batch_of(2)).mean(), model(batch_of(3)).mean()
    first.backward()
    found["before two forwards"] = counted(model)
    try:
        second.backward()
    except RuntimeError as error:
        found["and the second of these"] = str(error)

    model = make_model()
    model.samples = 95
    first, second = model(batch_of(2)).mean(), model(batch_of(3)).mean()
    (first + second).backward()
    found["for a joined loss"] = counted(model)
    return found


def test_a_number_is_of_the_forward_pass_before_it_if_that_has_none() -> None:
    for found in ranks.run_ranks(
        2, beside_other_forwards, timeout_s=60, preload=ranks.TORCH_DDP
    ).values():
        errors = [found.pop(name, "") for name in ("and the second", "and the second of these")]
        assert found == {
            "another forward before backward": 50.0,
            "and then": None,
            "twice through one graph": [60.0, 60.0],
            "an older graph before it": 70.0,
            "between two forwards": 80.0,
            "before two forwards": 90.0,
            "for a joined loss": 95.0,
        }
        for error in errors:
            assert "has counted for another one. Set model.samples before each forward()" in error


class Uncounted(nn.Module):
    """Its arguments have different first dimensions, unless there are 2 samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch) * factors
        return found


FACTORS = torch.tensor([2.0, 3.0], dtype=torch.float64)


def checkpointed(model: Any, samples: int, *, whole: bool = True) -> torch.Tensor:
    """`whole`: the loss is in the checkpoint, so that backward needs its tensors first."""

    def play(batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(batch, FACTORS)
        return nn.functional.mse_loss(output, torch.zeros_like(output)) if whole else output

    found: torch.Tensor = checkpoint(play, batch_of(samples), use_reentrant=False)
    return found if whole else found.mean()


def in_checkpoints(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = wrap(Uncounted(), weight="samples")
    model.samples = 10
    loss = checkpointed(model, 4)
    model.samples = 20
    loss.backward()
    found["after one before"] = [counted(model), model.samples]
    loss = checkpointed(model, 2)
    model.samples = 30
    loss.backward()
    found["after"] = [counted(model), model.samples]

    def two_losses() -> list[torch.Tensor]:
        losses = []
        for number in (40, 50):
            model.samples = number
            losses.append(checkpointed(model, 4))
        return losses

    for loss in two_losses():
        loss.backward()
        found.setdefault("before each of two", []).append(counted(model))
    sum(two_losses(), torch.zeros(())).backward()
    found["before each of one loss"] = counted(model)

    with model.no_sync():
        model.samples = 5
        loss = checkpointed(model, 4)
        model.samples = 6
        loss.backward()
    model.samples = 7
    checkpointed(model, 4).backward()
    found["in no_sync()"] = counted(model)

    for whole in (True, False):
        model.zero_grad()
        with model.no_sync():
            model.samples = 5
            loss = checkpointed(model, 4, whole=whole)
        second = checkpointed(model, 2, whole=whole)
        model.samples = 8
        with model.no_sync():
            loss.backward()
        second.backward()
        found.setdefault("between forwards and backwards", []).append(counted(model))
    return found


def test_a_checkpoint_that_has_the_loss_in_it_counts_as_without_it() -> None:
    for found in ranks.run_ranks(2, in_checkpoints, timeout_s=60, preload=ranks.TORCH_DDP).values():
        assert found == {
            "after one before": [20.0, None],
            "after": [30.0, None],
            "before each of two": [40.0, 50.0],
            "before each of one loss": 50.0,
            "in no_sync()": 13.0,
            "between forwards and backwards": [13.0, 13.0],
        }


def around_a_repeated_forward(rank: int, world_size: int) -> None:
    model = wrap(nn.Linear(3, 2, dtype=torch.float64), weight="samples")
    other = checkpoint(model, batch_of(4).requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        (model(batch_of(2 + rank)).square().mean() + other.square().mean()).backward()


def test_a_forward_that_a_nested_backward_repeats_beside_another_has_no_weight() -> None:
    results = ranks.run_ranks(2, around_a_repeated_forward, timeout_s=60, preload=ranks.TORCH_DDP)
    results.check()


class Told:
    """The numbers that a program has set, and who has them: a forward pass has at most two."""

    def __init__(self) -> None:
        self.open: dict[str, Any] | None = None  # set, and no pass has counted it
        self.forwards: list[dict[str, Any]] = []

    def say(self, number: float) -> None:
        self.open = {"number": number, "taken": False, "of": None}
        if self.forwards:
            self.forwards[-1]["after"] = self.open

    def forward(self, samples: int) -> None:
        if self.open is not None:
            self.open["taken"] = True
        self.forwards.append({"samples": samples, "before": self.open, "after": None})

    def backward(self, which: int) -> float | None:
        """The number that counts; None: an error."""
        through = self.forwards[which]
        after = through["after"]
        is_last = which == len(self.forwards) - 1
        if after is not None and after is self.open and (is_last or through["before"] is None):
            through["before"] = after
        own = through["before"]
        if own is not None and own["of"] not in (None, which):
            return None
        if own is not None:
            own["of"] = which
        if self.open is not None and (self.open["taken"] or self.open is own):
            self.open = None
        return through["samples"] if own is None else own["number"]


def walked(rank: int, world_size: int, seeds: int) -> list[str]:
    """Random programs: forwards, numbers, and backwards through any of the last graphs."""
    wrong = []
    for seed in range(seeds):
        rng = random.Random(seed)
        model, told = make_model(), Told()
        losses: list[torch.Tensor] = []
        said = []
        for number in range(40):
            what = rng.choice(["forward", "say", "backward"] * 3 + ["no batch"])
            if what == "say":
                model.samples = 100 + number
                told.say(100 + number)
                said.append("say")
                continue
            if what == "forward":
                losses.append(model(batch_of(number + 1)).mean())
                told.forward(number + 1)
                said.append("forward")
                continue
            if what == "no batch":
                with pytest.raises(ValueError, match="no rank has any samples"):
                    model.no_batch()
                told.open = None
                said.append("no_batch")
                continue
            if not losses:
                continue
            which = max(0, len(losses) - rng.randint(1, 3))
            wanted = told.backward(which)
            try:
                losses[which].backward(retain_graph=True)
                is_ = counted(model)
            except RuntimeError as error:
                is_ = None if "model.samples is for one pass" in str(error) else error
            said.append(f"backward {which}")
            if is_ != wanted:
                wrong.append(f"seed {seed}: {is_}, not {wanted}, after {said}")
                break
    return wrong


def test_random_programs_count_as_told() -> None:
    found = ranks.run_ranks(2, walked, args=(60,), timeout_s=120, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[], []]


def ended(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = make_model()
    model(batch_of(4)).mean().backward()
    state = copy.deepcopy(model.communication_state_dict())
    model.samples = 50
    model(batch_of(4))  # its loss was NaN
    model.load_communication_state_dict(state)
    found["pending"] = model.samples
    model(batch_of(3)).mean().backward()
    found["after a load"] = counted(model)

    model.samples = 50
    model.samples = None
    model(batch_of(2)).mean().backward()
    found["taken back"] = counted(model)
    return found


def test_a_load_and_none_end_a_number() -> None:
    for found in ranks.run_ranks(2, ended, timeout_s=60, preload=ranks.TORCH_DDP).values():
        assert found == {"pending": None, "after a load": 3.0, "taken back": 2.0}


class Inner(nn.Module):
    """Its forward goes backward itself, as a training_step of Lightning's manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.around: list[Any] = []  # the wrapper, which a list keeps out of the modules
        self.forgets = True

    def forward(self, batch: torch.Tensor, said: tuple[float, ...] = ()) -> list[float]:
        (model,), found = self.around, []
        for number in range(2):
            if number < len(said):
                model.samples = said[number]
            if self.forgets:
                self.zero_grad()
            if model.require_backward_grad_sync:
                model.reducer._rebuild_buckets()
                model.reducer.prepare_for_backward([])
            self.layer(batch).square().mean().backward()
            found.append(counted(model) if model.require_backward_grad_sync else 0.0)
        model.require_backward_grad_sync = False  # the wrapper shall expect no other backward
        return found


def within_forward(rank: int, world_size: int) -> dict[str, Any]:
    model = wrap(Inner(), weight="samples")
    model.module.around.append(model)

    def step(*args: Any) -> Any:
        counted_as = model(*args)
        model.require_backward_grad_sync = True
        return counted_as

    found = {"counted": step(batch_of(4 + rank)), "and the next batch": step(batch_of(2 + rank))}
    model.samples = 50
    found["said before forward"] = step(batch_of(3))
    found["said once within"] = step(batch_of(3), (60,))
    found["said for each"] = step(batch_of(3), (60, 70))
    found["and then"] = step(batch_of(3))

    values = [batch_of(4 + r) * (1 + r) for r in range(world_size)]
    step(values[rank])
    single = copy.deepcopy(model.module.layer)
    single.zero_grad()
    single(torch.cat(values)).square().mean().backward()
    found["off by"] = float((single.weight.grad - model.module.layer.weight.grad).abs().max())

    model._has_share = lambda: rank == 0  # as of a process that has joined
    found["without a share"] = step(batch_of(3))
    del model._has_share
    with model.no_sync():
        step(batch_of(3))
    found["after one in no_sync() that is forgotten"] = step(batch_of(3))
    model.module.forgets = False
    with model.no_sync():
        step(batch_of(3))
    try:
        step(batch_of(3))
    except RuntimeError as error:
        found["after one in no_sync()"] = str(error)
    return found


def test_a_backward_within_forward_counts_by_the_batch_of_that_forward() -> None:
    results = ranks.run_ranks(2, within_forward, timeout_s=60, preload=ranks.TORCH_DDP)
    for rank, found in enumerate(results.values()):
        assert found.pop("off by") < 1e-14
        assert "cannot tell which forward pass" in found.pop("after one in no_sync()")
        assert found == {
            "counted": [4.0 + rank] * 2,
            "and the next batch": [2.0 + rank] * 2,
            "said before forward": [50.0, 50.0],
            "said once within": [60.0, 60.0],
            "said for each": [60.0, 70.0],
            "and then": [3.0, 3.0],
            "without a share": [3.0 * (rank == 0)] * 2,
            "after one in no_sync() that is forgotten": [3.0, 3.0],
        }


class Beside(nn.Module):
    """Its forward goes backward from a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.layer(batch).sin().mean().backward()
        found: torch.Tensor = self.layer(batch)
        return found


def off_by(model: Any, batches: list[torch.Tensor]) -> float:
    """From the gradients of one process with each of these batches in turn."""
    single = copy.deepcopy(model.module)
    single.zero_grad()
    for batch in batches:
        single(batch).square().mean().backward()
    pairs = zip(single.parameters(), model.parameters(), strict=True)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)


def beside_forward(rank: int, world_size: int, ends: str) -> tuple[list[float], str]:
    model = wrap(Beside(), weight="samples")

    def drop(batch: torch.Tensor) -> None:
        with model.no_sync():
            model(batch)

    def trained(*samples: int) -> float:
        """In one reduction, of batches that are larger on rank 1."""
        model.zero_grad()
        batches = [[batch_of(n + 3 * r) * (1 + r) for r in range(world_size)] for n in samples]
        for each in batches[:-1]:
            with model.no_sync():
                model(each[rank]).square().mean().backward()
        model(batches[-1][rank]).square().mean().backward()
        return off_by(model, [torch.cat(each) for each in batches])

    off = [trained(4), trained(2), trained(5, 5)]
    drop(batch_of(2))
    off.append(trained(4))
    try:
        if ends == "another weight than the pass before":
            trained(5, 4)
        else:
            model.zero_grad()
            drop(batch_of(2))
            model(batch_of(2)).mean().backward()
    except RuntimeError as error:
        return off, str(error)
    return off, "no error"


@pytest.mark.parametrize("ends", ["another weight than the pass before", "another forward"])
def test_a_backward_within_forward_counts_with_that_of_its_outputs(ends: str) -> None:
    results = ranks.run_ranks(
        2, beside_forward, args=(ends,), timeout_s=60, preload=ranks.TORCH_DDP
    )
    for off, error in results.values():
        assert max(off) < 1e-14
        assert "cannot tell which forward pass" in error


class Loss:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """Its loss is in no tensor, list or dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> Loss:
        return Loss(self.layer(batch).square().mean())


class Apart(nn.Module):
    """Only a backward within forward, of 4 samples, uses one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.apart = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 4:
            self.apart.sum().backward()
        found: torch.Tensor = self.layer(batch)
        return found


def with_accumulate(rank: int, world_size: int) -> None:
    model = wrap(Beside(), weight="samples", accumulate=2)
    model(batch_of(5)).mean().backward()
    model(batch_of(4)).mean().backward()


def with_accumulate_of_hidden_losses(rank: int, world_size: int) -> None:
    model = wrap(Hiding(), weight="samples", accumulate=2)
    model(batch_of(5)).value.backward()
    with model.no_sync():
        model(batch_of(4)).value.backward()
    model(batch_of(5)).value.backward()


def with_a_number_after_forward(rank: int, world_size: int) -> None:
    model = wrap(Beside(), weight="samples")
    with model.no_sync():
        model(batch_of(4)).mean().backward()
    output = model(batch_of(4))
    model.samples = 7
    output.mean().backward()


def without_samples(rank: int, world_size: int) -> None:
    model = wrap(Beside(), weight="samples")
    model.samples = 0
    with model.no_sync():
        model(batch_of(4)).mean().backward()


UNCERTAIN = (
    with_accumulate,
    with_accumulate_of_hidden_losses,
    with_a_number_after_forward,
    without_samples,
)


@pytest.mark.parametrize("play", UNCERTAIN)
def test_what_no_weight_is_certain_of_is_an_error(play: Any) -> None:
    results = ranks.run_ranks(2, play, timeout_s=60, preload=ranks.TORCH_DDP, check=False)
    for each in results:
        assert each.error is not None, each.describe()
        assert "cannot tell which forward pass" in each.error.traceback


def certain(rank: int, world_size: int) -> tuple[dict[str, float], float]:
    off = {}
    values = [batch_of(4 + 3 * r) * (1 + r) for r in range(world_size)]
    model = wrap(Beside(), weight="samples", accumulate=2)
    for _ in range(2):
        model(values[rank]).square().mean().backward()
    off["accumulate"] = off_by(model, [torch.cat(values)] * 2)

    model = wrap(Beside(), weight="samples")
    with model.no_sync():
        model(values[rank]).square().mean().backward()
    model.samples = 99
    output = model(values[rank])
    model.samples = len(values[rank])
    output.square().mean().backward()
    off["a number after forward"] = off_by(model, [torch.cat(values)] * 2)

    model = wrap(Beside(), weight="samples")
    model.samples = 0 if rank == 0 else None
    model(values[rank]).square().mean().backward()
    off["without samples"] = off_by(model, values[1:])

    apart = wrap(Apart(), weight="samples", find_unused_parameters=True)
    with apart.no_sync():
        apart(batch_of(4)).mean().backward()
    apart(batch_of(5)).mean().backward()
    return off, float(apart.module.apart.grad)


def test_a_backward_within_forward_of_a_certain_weight_counts() -> None:
    for off, apart in ranks.run_ranks(2, certain, timeout_s=60, preload=ranks.TORCH_DDP).values():
        assert max(off.values()) < 1e-14, off
        assert abs(apart - 2 * 4 / 9) < 1e-14


class TakingBack(Beside):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        super().forward(batch)
        self.layer.zero_grad(set_to_none=False)
        found: torch.Tensor = self.layer(batch)
        return found


def of_nobody(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    texts, off = [], []
    taking_back = wrap(TakingBack(), weight="samples", sync_every=8)
    taking_back.samples = 0
    taking_back(batch_of(4)).square().mean().backward()
    off += [float(each.grad.abs().max()) for each in taking_back.parameters()]
    values = [batch_of(4 + 3 * r) * (1 + r) for r in range(world_size)]
    for options in ({}, {"sync_every": 8}):
        model = wrap(Beside(), weight="samples", **options)
        model.samples = 0
        with pytest.raises(ValueError) as raised:
            model(batch_of(4)).square().mean().backward()
        texts.append(str(raised.value))
        model.zero_grad()
        model(values[rank]).square().mean().backward()
        off.append(off_by(model, [torch.cat(values)]))
    return texts, off


def test_a_backward_within_forward_of_a_step_without_samples_is_an_error() -> None:
    for texts, off in ranks.run_ranks(2, of_nobody, timeout_s=60, preload=ranks.TORCH_DDP).values():
        assert all(
            "within forward() has no weight, and it stays in .grad" in each for each in texts
        )
        assert max(off) < 1e-14, off


class Raising(nn.Module):
    """Its loss is in no tensor, list or dict, and no batch may have 8 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> Loss:
        if len(batch) == 8:
            self.layer(batch).mean().backward()
        if len(batch) >= 7:
            raise ValueError("a bad batch")
        return Loss(self.layer(batch).square().mean())


def raising(rank: int, world_size: int) -> dict[str, Any]:
    model = wrap(Raising(), weight="samples")
    state = copy.deepcopy(model.communication_state_dict())
    found: dict[str, Any] = {}

    def fail(samples: int) -> None:
        with pytest.raises(ValueError, match="a bad batch"):
            model(batch_of(samples))

    def penalty() -> None:
        model.zero_grad()
        model.module.layer.weight.square().sum().backward()

    def forward_and_backward() -> float:
        model(batch_of(1))  # its graph is dropped
        model(batch_of(3)).value.backward()
        return counted(model)

    fail(7)
    penalty()
    found["after one that raised"] = forward_and_backward()
    loss = model(batch_of(4)).value
    fail(7)
    loss.backward()
    found["of the one before"] = counted(model)
    part = checkpoint(model, batch_of(5), use_reentrant=False)
    part.value.backward()
    found["of a checkpoint"] = counted(model)
    penalty()
    found["after a checkpoint"] = forward_and_backward()
    model.reducer.forward_began(5.0)
    model.load_communication_state_dict(state)
    penalty()
    found["after a load"] = forward_and_backward()
    model.reducer.forward_began(5.0)
    model.reducer._reset_state()
    penalty()
    found["after a reset"] = forward_and_backward()
    model.zero_grad()
    fail(8)
    try:
        model(batch_of(3)).value.backward()
    except RuntimeError as error:
        found["within one that raised"] = str(error)
    return found


def test_a_forward_that_raises_leaves_nothing() -> None:
    results = ranks.run_ranks(2, raising, timeout_s=60, preload=ranks.TORCH_DDP)
    for found in results.values():
        assert "cannot tell which forward pass" in found.pop("within one that raised")
        assert found == {
            "after one that raised": 3.0,
            "of the one before": 4.0,
            "of a checkpoint": 5.0,
            "after a checkpoint": 3.0,
            "after a load": 3.0,
            "after a reset": 3.0,
        }


def test_numbers_of_numpy_are_numbers() -> None:
    from pycomm.ddp.weights import check_samples

    for number in (np.int64(3), np.uint8(3), np.float32(3), np.array(3), torch.tensor(3)):
        assert check_samples("samples", number) == 3.0
    for bad in (np.bool_(True), True, torch.tensor(True), np.float64("nan"), "3", None, 3j):
        with pytest.raises(ValueError, match="is neither 0 nor a number from 1e-20"):
            check_samples("samples", bad)
    for bad, said in (
        (np.array([1, 2]), r"array\(\[1, 2\]\)"),
        (torch.ones(2), r"tensor\(\[1., 1.\]\)"),
        (torch.ones(0), r"tensor\(\[\]\)"),
        (10**400, "1000"),
    ):
        with pytest.raises(ValueError, match=f"samples={said}.* is neither"):
            check_samples("samples", bad)
