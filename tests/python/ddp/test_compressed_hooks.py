"""comm_hooks.top_k: convergence beside fp32, the same bits on all ranks, saved states.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

import copy
import time
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import TORCH_DDP, run_ranks
from small_training import batch_of, digest, make_model, train
from torch import nn

import pycomm
from pycomm.comm_hooks import CompressedHook, top_k
from pycomm.comm_hooks.sparse import TopK

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

STEPS = 60


def sparse(module: nn.Module) -> CompressedHook:
    return top_k(fraction=0.05, module=module)


def wrap(kind: str, module: nn.Module, hook: CompressedHook | None) -> nn.Module:
    ddp = (
        pycomm.DistributedDataParallel if kind == "pycomm" else nn.parallel.DistributedDataParallel
    )
    model: nn.Module = ddp(module, bucket_cap_mb=0.05)
    if hook is not None:
        model.register_comm_hook(None, hook)  # type: ignore[operator]
    return model


def train_with(rank: int, world_size: int, kind: str, name: str) -> tuple[list[float], str]:
    module = make_model()
    model = wrap(kind, module, sparse(module) if name == "top_k" else None)
    return train(model, rank, STEPS), digest(*model.parameters())


def final(runs: list[Any]) -> float:
    return sum(sum(losses[-10:]) for losses, _ in runs) / (10 * len(runs))


@pytest.mark.parametrize("kind", rings.first_of(["pycomm", "torch"]))
def test_training_ends_near_fp32_with_the_same_bits(kind: str) -> None:
    exact = run_ranks(2, train_with, args=(kind, "fp32"), preload=TORCH_DDP).values()
    start = exact[0][0][0]
    runs = run_ranks(2, train_with, args=(kind, "top_k"), preload=TORCH_DDP).values()
    assert runs[0][1] == runs[1][1]
    # Of the way that fp32 has gone, most, with a 20th of the entries.
    assert (start - final(runs)) / (start - final(exact)) > 0.8


def reduce_constant(rank: int, world_size: int) -> list[torch.Tensor]:
    """The same gradients step after step: what is reduced in the end is all that went in."""
    module = nn.Linear(40, 40, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    model = wrap("torch", module, sparse(module))
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(40, 40, generator=generator)
    gradient[0, 0] = 1000.0  # this one is sent in every step, and others wait
    total = torch.zeros(40, 40)
    for _ in range(30):
        model.zero_grad()
        # d loss / d weight is `gradient`: the inputs are unit vectors.
        (model(torch.eye(40)).T * gradient).sum().backward()
        total += module.weight.grad  # type: ignore[arg-type]
    return [total, gradient]


def test_error_feedback_delivers_in_the_end_what_was_held_back() -> None:
    runs = run_ranks(2, reduce_constant, preload=TORCH_DDP).values()
    wanted = 30 * torch.stack([gradient for _, gradient in runs]).mean(0)
    got = runs[0][0]
    assert torch.equal(got, runs[1][0])
    small = slice(1, 6)
    share = float((got[small] * wanted[small]).sum() / (wanted[small] ** 2).sum())
    assert share > 0.3, share


class Bucket:
    """Of one parameter; as torch's, which no program can make."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._parameter, self._gradient = parameter, gradient

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]


def test_a_gather_that_fails_takes_nothing_from_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(10, 10, bias=False)
    reduction = TopK(0.1, module)
    fails = False

    def gather(rows: torch.Tensor, packed: torch.Tensor, group: Any) -> None:
        if fails:
            raise RuntimeError("a rank died")
        rows.copy_(packed)

    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    bucket: Any = Bucket(module.weight, torch.randn(100))
    reduction.reduce(None, bucket)
    before = reduction.residuals.state_dict()["weight"]
    assert before.count_nonzero() == 90
    bucket, fails = Bucket(module.weight, torch.randn(100)), True
    with pytest.raises(RuntimeError, match="a rank died"):
        reduction.reduce(None, bucket)
    assert torch.equal(reduction.residuals.state_dict()["weight"], before)


def stop_and_go_on(rank: int, world_size: int) -> tuple[str, str]:
    """Half the steps, saved, loaded into new objects, the other half; against all in one go."""
    digests = []
    for resumes in (False, True):
        module = make_model()
        hook = sparse(module)
        # With this option torch leaves a bucket's parameters in order after the first step.
        model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            if step == 4:
                state = hook.state_dict()  # also where it goes on: it settles what it holds
                assert set(state) == {key for key, _ in module.named_parameters()}
                assert any(tensor.abs().sum() > 0 for tensor in state.values())
            if step == 4 and resumes:
                saved = copy.deepcopy(module.state_dict())
                module = make_model()
                module.load_state_dict(saved)
                hook = sparse(module)
                hook.load_state_dict(state)
                model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
                model.register_comm_hook(None, hook)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            inputs, targets = batch_of(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        digests.append(digest(*model.parameters()))
    return digests[0], digests[1]


def test_a_loaded_state_goes_on_as_if_nothing_had_happened() -> None:
    runs = run_ranks(2, stop_and_go_on, preload=TORCH_DDP).values()
    assert len({text for run in runs for text in run}) == 1


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"fraction=0 is not allowed: use more than 0 and up to 1"):
        top_k(fraction=0)
    with pytest.raises(RuntimeError, match="make it with module=<the module>"):
        top_k(fraction=0.5).state_dict()
    hook = top_k(fraction=0.5, module=nn.Linear(2, 2))
    with pytest.raises(KeyError, match="no parameter 'other'"):
        hook.load_state_dict({"other": torch.zeros(2)})
    with pytest.raises(ValueError, match="shape"):
        hook.load_state_dict({"weight": torch.zeros(2)})


def share(rank: int, world_size: int) -> list[float]:
    """How far off the averages of two models are that share a hook, each rank late with another."""
    hook = top_k(fraction=1.0)
    models: list[Any] = []
    for which in range(2):
        model = pycomm.DistributedDataParallel(nn.Linear(30, 30, bias=False))
        codec_of = model._codec_of  # the hook's thread calls it first

        def late(bucket: Any, is_late: bool = which == rank, codec_of: Any = codec_of) -> Any:
            time.sleep(0.2 if is_late else 0.0)
            return codec_of(bucket)

        model._codec_of = late
        model.register_comm_hook(None, hook)
        models.append(model)
    off = []
    for _ in range(3):
        for model in models:
            model.zero_grad()
        (models[0](torch.eye(30)) + 10 * models[1](torch.eye(30))).mul(1.0 + rank).sum().backward()
        for model, factor in zip(models, (1, 10), strict=True):
            off.append(float((model.module.weight.grad - 1.5 * factor).abs().max()))
    return off


def test_two_wrappers_share_a_hook_and_no_gradients() -> None:
    for off in run_ranks(2, share, preload=TORCH_DDP).values():
        assert max(off) < 1e-5, off


def refuse_doubles(rank: int, world_size: int) -> str:
    module = nn.Linear(4, 4).double()
    model = wrap("torch", module, top_k(fraction=0.5))
    try:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    except TypeError as error:
        return str(error)
    return "nothing"


def test_other_dtypes_are_refused() -> None:
    (text,) = run_ranks(1, refuse_doubles, preload=TORCH_DDP).values()
    assert text == "top_k reduces float32 gradients on the CPU, not torch.float64 on cpu"


def survive_nan(rank: int, world_size: int) -> list[bool]:
    module = nn.Linear(64, 64, bias=False)
    model = wrap("torch", module, top_k(fraction=0.01))
    seen = []
    for step in range(3):
        model.zero_grad()
        factor = torch.full((64, 64), float("nan") if step == 0 and rank == 0 else 1.0)
        (model(torch.eye(64)).T * factor).sum().backward()
        seen.append(bool(torch.isnan(module.weight.grad).any()))  # type: ignore[arg-type]
    dist.barrier()
    return seen


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(50)) for _ in range(2))

    def forward(self, slopes: torch.Tensor, left: bool) -> torch.Tensor:
        loss = (self.right * slopes).sum()
        return loss + (self.left * slopes).sum() if left else loss


def leave_out(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    """How far arrived and kept are from given: in half the steps no rank uses left."""
    module = Sides()
    ddp = (
        pycomm.DistributedDataParallel if kind == "pycomm" else nn.parallel.DistributedDataParallel
    )
    model = ddp(module, find_unused_parameters=True)
    hook = top_k(fraction=0.1, module=module)
    model.register_comm_hook(None, hook)
    given, arrived = torch.zeros(50), torch.zeros(50)
    for step in range(6):
        slopes = torch.randn(50, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        used = step % 2 == 0
        model(slopes * (100.0 if used else 1.0), used).backward()
        if used:
            given += slopes * 100.0
            assert module.left.grad is not None
            arrived += module.left.grad * world_size
    missing = given + 0.0
    dist.all_reduce(missing)
    kept = hook.state_dict()["left"].clone()
    dist.all_reduce(kept)
    return float((missing - arrived - kept).abs().max()), float(kept.abs().max())


@pytest.mark.parametrize("kind", ["pycomm", "torch"])
def test_what_is_kept_for_a_parameter_waits_until_it_is_used(kind: str) -> None:
    for off, kept in run_ranks(2, leave_out, args=(kind,), preload=TORCH_DDP).values():
        assert off < 1e-3 < kept


def skip_diverged(rank: int, world_size: int, kind: str) -> float:
    """The largest average after a batch of 1e25 whose step is dropped; one bucket has the Inf."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    model = wrap(kind, module, top_k(fraction=0.01))
    largest = 0.0
    for step in range(3):
        model.zero_grad()
        size = 1e25 if step == 1 else 1e-3
        loss = sum((layer.weight * (size * torch.randn(64, 64))).sum() for layer in module)
        if step == 1 and rank == 0:
            loss = loss + module[1].weight[0, 0] * float("inf")
        output = model(torch.zeros(1, 64)).sum()  # the wrapper's graph reaches all parameters
        (output + loss).backward()
        if step == 2:
            largest = max(float(each.grad.abs().max()) for each in module.parameters())
    return largest


@pytest.mark.parametrize("kind", rings.first_of(["pycomm", "torch"]))
def test_a_batch_that_diverged_and_was_dropped_leaves_nothing(kind: str) -> None:
    found = run_ranks(2, skip_diverged, args=(kind,), preload=TORCH_DDP).values()
    assert max(found) < 0.01


def test_a_nan_is_seen_once_and_does_not_stay() -> None:
    assert run_ranks(2, survive_nan, preload=TORCH_DDP).values() == [[True, False, False]] * 2
