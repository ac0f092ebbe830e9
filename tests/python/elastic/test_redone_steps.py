"""A step that is summed again has the bits of one that was not."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
import ranks
import rings
import torch
from ddp_rig import wrap
from elastic_rig import Net, Scripted, agreeing, batch_of

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(400)]

STEPS = 7
SCALES = (1.0, 1.0, 1e6, 1.0, 1e-7, 1e-7, 30.0)
"""Of the loss, by step: fp16 buckets have to be packed with another exponent now and then."""


def redos(step: int) -> int:
    return (1, 0, 2, 1, 1, 3, 1)[step]


@dataclasses.dataclass(frozen=True)
class Case:
    wire: str | None
    passes: str = "one"
    """"one"; "no_sync": one more before it, which accumulates; "samples": of other sizes on each
    rank, and at times none; "weightless": none anywhere in one step; "freeze": a parameter is
    frozen for two steps."""
    unused: bool = False
    sparse: bool = False
    options: tuple[tuple[str, Any], ...] = ()


CASES = [
    Case(None),
    Case("bf16"),
    Case("fp16"),
    Case("int8"),
    Case("int8", options=(("error_feedback", False),)),
    Case(None, sparse=True),
    Case("fp16", unused=True, options=(("find_unused_parameters", True),)),
    Case("int8", unused=True, options=(("find_unused_parameters", True),)),
    Case(None, unused=True, options=(("static_graph", True),)),
    Case("int8", unused=True, options=(("static_graph", True),)),
    Case("int8", options=(("accumulate", 2),)),
    Case("fp16", passes="no_sync", options=(("accumulate", 2),)),
    Case(None, passes="samples", options=(("weight", "samples"),)),
    Case("fp16", passes="samples", options=(("weight", "samples"),)),
    Case("int8", passes="samples", options=(("weight", "samples"), ("accumulate", 2))),
    Case("int8", passes="weightless", options=(("weight", "samples"),)),
    Case("int8", passes="freeze"),
    Case(None, options=(("broadcast_buffers", False),)),
]


def hash_of(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclasses.dataclass
class Trace:
    """What a training leaves, by step and name; and its last counters."""

    steps: list[dict[str, Any]]
    stats: dict[str, Any]


def run_pass(model: Any, case: Case, rank: int, step: int, number: int) -> None:
    samples = 6
    if case.passes in ("samples", "weightless"):
        samples = 3 + (rank + 2 * step + number) % 4
        if (rank == 1 and step == 3) or (case.passes == "weightless" and step == 2):
            model.no_batch()
            return
    takes = "left"
    if case.unused and dict(case.options).get("find_unused_parameters"):
        takes = "right" if (rank + step) % 3 == 0 else "left"
    batch = batch_of(rank, 10 * step + number, samples)
    (model(batch, takes).square().mean() * SCALES[step] * (1 + 3 * rank)).backward()


def trace(case: Case, rank: int, elastic: Any) -> Trace:
    options = dict(case.options)
    model = wrap(
        Net(unused=case.unused, sparse=case.sparse),
        wire_dtype={"table.*": None, "*": case.wire} if case.sparse else case.wire,
        bucket_cap_mb=0.02,
        elastic=elastic,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = options.get("accumulate", 1)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if case.passes == "freeze":
            model.module.wide.weight.requires_grad_(step not in (2, 3))
        if case.passes == "no_sync":
            with model.no_sync():
                run_pass(model, case, rank, step, 9)
        raised = ""
        try:
            for number in range(passes):
                run_pass(model, case, rank, step, number)
        except ValueError as error:
            raised = str(error)
        state = model.communication_state_dict()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / SCALES[step]
        grads = hash_of(each.grad for each in model.parameters())
        optimizer.step()
        steps.append(
            {
                "raised": raised,
                "grads": grads,
                "parameters": hash_of(model.parameters()),
                "buffers": hash_of(model.buffers()),
                "residuals": hash_of(v for _, v in sorted(state.get("residuals", {}).items())),
                "exponents": state.get("fp16_exponents"),
                "order": state.get("bucket_order"),
                "accumulated": state["accumulated"],
                "weighed": model.reducer.weighed() if "weight" in options else None,
            }
        )
    return Trace(steps, dataclasses.asdict(model.stats()))


def all_traces(rank: int, world_size: int) -> list[list[Trace]]:
    import pycomm

    found = []
    for case in CASES:
        elastic = pycomm.Elastic()
        traces = [trace(case, rank, None)]
        for script in (lambda step: 0, redos):
            with agreeing(lambda group, script=script: Scripted(group, script)):
                traces.append(trace(case, rank, elastic))
        found.append(traces)
    return found


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_a_step_that_is_summed_again_has_the_same_bits(world_size: int) -> None:
    found = ranks.run_ranks(world_size, all_traces, timeout_s=200, preload=ranks.TORCH_DDP)
    for rank, results in enumerate(found.values()):
        for number, (case, (plain, once, again)) in enumerate(zip(CASES, results, strict=True)):
            leader = found.values()[0][number]
            for step in range(STEPS):
                where = (case, rank, step)
                assert again.steps[step] == once.steps[step], where
                same = {**plain.steps[step], "buffers": once.steps[step]["buffers"]}
                assert once.steps[step] == same, where
                assert again.steps[step]["parameters"] == leader[2].steps[step]["parameters"], where
                if dict(case.options).get("broadcast_buffers", True):
                    buffers = again.steps[step]["buffers"]
                    assert buffers == leader[0].steps[step]["buffers"], where
            for name in ("passes", "forgotten_residuals", "nonfinite_buckets"):
                assert plain.stats[name] == once.stats[name] == again.stats[name], (case, name)
            assert once.stats["steps"] == again.stats["steps"] == STEPS, (
                case
            )  # a weightless one, too
            total = sum(redos(step) for step in range(STEPS))
            assert (once.stats["redone_steps"], again.stats["redone_steps"]) == (0, total), case
            assert (plain.stats["epochs"], once.stats["epochs"]) == (0, 1), case
            assert again.stats["epochs"] == total + 1, case
            if case.wire == "fp16":
                assert once.stats["overflowed_buckets"] > 0, case
                assert again.stats["overflowed_buckets"] > once.stats["overflowed_buckets"], case


class Renewed(Scripted):
    """The same members meet again before each step."""

    def begin(self) -> bool:
        super().begin()
        return True


def counts_epochs(rank: int, world_size: int) -> tuple[int, int]:
    import pycomm

    with agreeing(lambda group: Renewed(group, lambda step: 0)):
        model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())
    for step in range(40):
        model(batch_of(rank, step)).square().mean().backward()
    return len(model.reducer.stats().past), model.stats().epochs


def test_many_changes_of_members_are_counted_in_little_memory() -> None:
    """These counters are copied with each gradient."""
    for past, epochs in ranks.run_ranks(2, counts_epochs, preload=ranks.TORCH_DDP).values():
        assert (past, epochs) == (1, 41)
