"""All short sequences of forwards and backwards of two wrappers that have parameters in common.

Right is what the forward pass says: its backward averages the gradients of its wrapper, unless it
was in no_sync(). If forward returns an object whose tensors the wrapper does not find, it cannot
always know; but nothing is wrong without an error that torch's wrapper does right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(4000)]

PLAIN, REENTRANT, CHECKPOINT, WHOLE = "plain", "reentrant", "checkpoint", "whole checkpoint"
"""The last one repeats all of forward, not only up to the last tensor that backward needs."""


@dataclasses.dataclass(frozen=True)
class Forward:
    which: int
    """Of the two wrappers."""
    marked: bool
    """Its output is a tensor."""
    synced: bool
    how: str = PLAIN

    def __str__(self) -> str:
        words = [
            "AB"[self.which],
            "" if self.marked else "object",
            "" if self.synced else "no_sync",
        ]
        return " ".join([word for word in words if word] + [self.how] * (self.how != PLAIN))


Event = Forward | int
"""A number: the backward of that forward."""


def forwards(hows: Sequence[str]) -> list[Forward]:
    return [
        Forward(which, marked, synced, how)
        for which, marked, synced, how in itertools.product(
            (0, 1), (True, False), (True, False), hows
        )
        if marked or how != REENTRANT  # which gives tensors only their graph
    ]


def orders(length: int) -> Iterator[tuple[int, ...]]:
    """Each ends with a backward: -1 is a forward, another number the backward of that one."""

    def longer(so_far: tuple[int, ...], left: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if len(so_far) == length:
            if so_far[-1] >= 0:
                yield so_far
            return
        yield from longer((*so_far, -1), left | {so_far.count(-1)})
        for each in sorted(left):
            yield from longer((*so_far, each), left - {each})

    return longer((), frozenset())


def sequences(longest: int, hows: Sequence[str]) -> Iterator[tuple[Event, ...]]:
    """A has the first forward. Of three forwards one at most is in a checkpoint."""
    for length in range(2, longest + 1):
        for order in orders(length):
            for kinds in itertools.product(forwards(hows), repeat=order.count(-1)):
                if kinds[0].which or (len(kinds) > 2 and sum(k.how != PLAIN for k in kinds) > 1):
                    continue
                rest = iter(kinds)
                yield tuple(next(rest) if each < 0 else each for each in order)


class Result:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Net(nn.Module):
    """The gradient of `trunk` and `head` is the batch's value.

    They come in the order `bias`, `head`, `trunk`.
    """

    bias: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(self, trunk: nn.Parameter) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Parameter(torch.zeros(2))
        self.register_parameter("bias", None)
        self.register_parameter("scale", None)

    def forward(self, batch: torch.Tensor, marked: bool) -> Any:
        out = (self.trunk * batch).sum() + (self.head * batch).sum()
        if self.bias is not None:
            out = out + self.bias
        return out if marked else Result(out)

    def found(self) -> list[float]:
        grads = [each.grad for each in (self.trunk, self.head, self.scale) if each is not None]
        return [0.0 if each is None else float(each[0]) for each in grads]


RELATIONS = (
    "one module",
    "one module, weighed",
    "a scale beside",
    "a common trunk",
    "a common head",
)


def nets_of(relation: str) -> list[Net]:
    one = Net(nn.Parameter(torch.zeros(2)))
    if relation == "a common trunk":
        two = Net(one.trunk)
        one.bias, two.bias = (nn.Parameter(torch.zeros(())) for _ in range(2))
        return [one, two]
    if relation == "a common head":
        two = Net(nn.Parameter(torch.zeros(2)))
        two.head = one.head
        return [one, two]
    if relation == "a scale beside":  # its gradient comes before the graph is entered
        one.scale = nn.Parameter(torch.zeros(2))
    return [one, one]


class Wrappers:
    """Two, and what has become of them."""

    def __init__(self, relation: str, by_torch: bool, second_first: bool = False) -> None:
        self.relation, self.by_torch, self.second_first = relation, by_torch, second_first
        self.group: Any = None
        self.renew()

    def renew(self) -> None:
        """After an error, which may have aborted the group."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.nets = nets_of(self.relation)
        self.group = dist.new_group()
        options: dict[str, Any] = {"process_group": self.group}
        make: Any = nn.parallel.DistributedDataParallel if self.by_torch else wrap
        if "weighed" in self.relation and not self.by_torch:
            options["weight"] = "samples"
        order = -1 if self.second_first else 1
        self.models = [make(net, **options) for net in self.nets[::order]][::order]

    def forward(self, kind: Forward, value: float) -> torch.Tensor:
        model, net = self.models[kind.which], self.nets[kind.which]
        batch = torch.full((2,), value, requires_grad=kind.how == REENTRANT)
        with self.mode(kind):
            if kind.how == PLAIN:
                out = model(batch, kind.marked)
            else:
                with set_checkpoint_early_stop(kind.how != WHOLE):
                    out = checkpoint(
                        model,
                        batch,
                        kind.marked,
                        use_reentrant=kind.how == REENTRANT,
                        preserve_rng_state=False,
                    )
        loss: torch.Tensor = out if kind.marked else out.value
        return loss if net.scale is None else loss + (net.scale * value).sum()

    def mode(self, kind: Forward) -> Any:
        return contextlib.nullcontext() if kind.synced else self.models[kind.which].no_sync()

    def play(
        self, sequence: tuple[Event, ...], rank: int, left_out: int | None = None
    ) -> tuple[list[Any], str]:
        """The gradients behind each backward, and an error if there was one.

        Forwards of the wrapper `left_out` are not made.
        """
        for net in self.nets:
            net.zero_grad()
        found: list[Any] = []
        given: list[tuple[Any, Forward]] = []
        try:
            for event in sequence:
                if isinstance(event, Forward):
                    value = 4.0 ** len(given) * (1 + rank)
                    made = event.which != left_out
                    given.append((self.forward(event, value) if made else None, event))
                    continue
                loss, kind = given[event]
                # The forward that counts is in the backward of a reentrant checkpoint.
                with self.mode(kind) if kind.how == REENTRANT else contextlib.nullcontext():
                    loss.backward()
                found.append([net.found() for net in self.nets])
            self.go_on(rank)
        except (RuntimeError, ArithmeticError) as error:
            self.renew()
            return found, f"{type(error).__name__}: {error}"
        return found, ""

    def play_alone(self, sequence: tuple[Event, ...], rank: int) -> tuple[list[Any], str]:
        """Without checkpoints, and without forwards of a wrapper that has no backward."""
        kinds = [each for each in sequence if isinstance(each, Forward)]
        used = {kinds[each].which for each in sequence if isinstance(each, int)}
        left_out = (1 - used.pop()) if len(used) == 1 else None
        return self.play(tuple(map(plain, sequence)), rank, left_out)

    def go_on(self, rank: int) -> None:
        """A pass of each: it ends with an error if something is left of those before."""
        for which, net in enumerate(self.nets):
            for each in self.nets:
                each.zero_grad()
            self.forward(Forward(which, marked=True, synced=True), 2.0 * rank).backward()
            if set(net.found()) != {1.0}:
                raise ArithmeticError(f"{net.found()} in the next step")


def wanted(relation: str, sequence: tuple[Event, ...], rank: int, world_size: int) -> list[Any]:
    names = [["trunk", "head"], ["trunk", "head"]]
    if relation.startswith("a common"):
        names[1][relation == "a common trunk"] = "other"
    if relation == "a scale beside":
        names = [[*each, "scale"] for each in names]
    grads = {name: [0.0] * world_size for each in names for name in each}
    kinds = [each for each in sequence if isinstance(each, Forward)]
    found: list[Any] = []
    for event in sequence:
        if isinstance(event, Forward):
            continue
        for name in names[kinds[event].which]:
            grads[name] = [old + 4.0**event * (1 + r) for r, old in enumerate(grads[name])]
            if kinds[event].synced:
                grads[name] = [sum(grads[name]) / world_size] * world_size
        found.append([[grads[name][rank] for name in each] for each in names])
    return found


def plain(event: Event) -> Event:
    return dataclasses.replace(event, how=PLAIN) if isinstance(event, Forward) else event


def spell(sequence: tuple[Event, ...]) -> str:
    return ", ".join(f"backward {e}" if isinstance(e, int) else str(e) for e in sequence)


def asks_late(event: Event) -> bool:
    """Backward repeats it outside no_sync(), so that it asks for a pass there."""
    return (
        isinstance(event, Forward) and event.how == WHOLE and not event.marked and not event.synced
    )


def repeated(event: Event) -> Event:
    """As it is repeated. An average adds up with later ones to what a sum of this rank would."""
    if isinstance(event, Forward) and asks_late(event):
        return dataclasses.replace(event, synced=True)
    return event


def stays_local(
    sequence: tuple[Event, ...], found: list[Any], right: list[Any], theirs: list[Any]
) -> bool:
    """A backward that averages has not, as torch's does. An error in the next step is too late."""
    kinds = [each for each in sequence if isinstance(each, Forward)]
    synced = [kinds[each].synced for each in sequence if isinstance(each, int)]
    ends = zip(synced, found, right, theirs, strict=False)
    return any(averages and ours != good == other for averages, ours, good, other in ends)


def between(found: list[Any], right: list[Any], theirs: list[Any]) -> bool:
    """Each of them is right or as torch's, and not all that torch does right is wrong."""
    if theirs == right or len(theirs) != len(found):
        return False
    return all(each in two for each, *two in zip(found, right, theirs, strict=True))


CANNOT_TELL = 'weight="samples" cannot tell which forward pass'
"""Torch's wrapper has no weights, and need not know."""

ENDS = (
    "right",
    "an error, as torch's",
    "an error",
    "as torch's",
    "averaged by a repeated forward",
    "an error of weights alone",
    "as torch's without the other",
)
"""In the last one torch's values are the same, and it raises in the next step, for the sake of a
forward of the wrapper that has no backward: without that forward it raises nothing."""


def walk(
    rank: int, world_size: int, relation: str, played: Sequence[tuple[Event, ...]]
) -> tuple[list[str], dict[str, int]]:
    """Complaints, and the number of sequences by how they ended."""
    ours, torchs = Wrappers(relation, by_torch=False), Wrappers(relation, by_torch=True)
    others = Wrappers(relation, by_torch=False, second_first=True)
    wrong: list[str] = []
    counts = dict.fromkeys(ENDS, 0)
    for sequence in played:
        if relation == "a scale beside" and any(
            isinstance(each, Forward) and each.how == REENTRANT for each in sequence
        ):
            continue  # may be an error that names the scale
        right = wanted(relation, sequence, rank, world_size)
        found, error = ours.play(sequence, rank)
        found_so, error_so = others.play(sequence, rank)
        if (found_so, bool(error_so)) != (found, bool(error)):
            wrong.append(
                f"{spell(sequence)}: {found} {error}; with B made first {found_so} {error_so}"
            )
        failed = torch.tensor(float(found != right or error != ""))
        dist.all_reduce(failed)
        if not failed:
            counts["right"] += 1
            continue
        # Only tensors, or something is left for the next step: no error of torch's excuses that.
        marked = all(each.marked for each in sequence if isinstance(each, Forward))
        marked = marked or error.startswith("ArithmeticError")
        theirs, their_error = ([], "not asked") if marked else torchs.play(sequence, rank)
        if not marked and not error and their_error:  # it cannot do with all checkpoints
            theirs, their_error = torchs.play(tuple(map(plain, sequence)), rank)
        averaged = wanted(relation, tuple(map(repeated, sequence)), rank, world_size)
        if stays_local(sequence, found, right, theirs):
            wrong.append(f"{spell(sequence)}: {found} {error}, not {right} as torch's")
        elif not marked and error and their_error:
            counts["an error, as torch's"] += 1
        elif not marked and CANNOT_TELL in error:
            counts["an error of weights alone"] += 1
        elif not marked and error and theirs != right:
            counts["an error"] += 1
        elif not marked and not error and not their_error and between(found, right, theirs):
            counts["as torch's"] += 1
        elif not (marked or error) and (their_error or theirs != right) and found == averaged:
            counts["averaged by a repeated forward"] += 1
        elif not (marked or error or found != theirs) and torchs.play_alone(sequence, rank) == (
            found,
            "",
        ):
            counts["as torch's without the other"] += 1
        else:
            wrong.append(
                f"{spell(sequence)}: {found} {error}, not {right}; torch: {theirs} {their_error}"
            )
        if len(wrong) == 20:
            break
    return wrong, counts


COUNTS = {
    "one module": ((699, 0, 0, 99, 0, 0, 0), (792, 0, 0, 140, 0, 0, 0)),
    "one module, weighed": ((699, 0, 0, 99, 0, 0, 0), (786, 0, 0, 140, 0, 6, 0)),
    "a scale beside": ((387, 126, 0, 75, 0, 0, 0), (718, 0, 0, 214, 0, 0, 0)),
    "a common trunk": ((585, 198, 0, 15, 0, 0, 0), (792, 67, 0, 55, 0, 0, 18)),
    "a common head": ((699, 24, 0, 63, 12, 0, 0), (792, 71, 0, 55, 0, 0, 14)),
}
"""Of three events, and of four without checkpoints: in the order of ``ENDS``."""


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("longest", "hows"),
    [
        pytest.param(3, (PLAIN, REENTRANT, CHECKPOINT, WHOLE), id="three"),
        pytest.param(4, (PLAIN,), id="four, plain"),
        rings.nightly((4, (PLAIN, REENTRANT, CHECKPOINT, WHOLE)), id="four"),
    ],
)
def test_every_short_sequence(relation: str, longest: int, hows: tuple[str, ...]) -> None:
    args = (relation, list(sequences(longest, hows)))
    found = ranks.run_ranks(2, walk, args=args, timeout_s=3600, preload=ranks.TORCH_DDP)
    for wrong, counts in found.check().values():
        assert not wrong, f"{counts}:\n" + "\n".join(wrong)
        if longest == 3 or len(hows) == 1:
            assert counts == dict(zip(ENDS, COUNTS[relation][longest - 3], strict=True))


REPEATED = Forward(0, marked=False, synced=False, how=WHOLE)
"""The wrapper takes it for a forward outside no_sync() when backward repeats it."""


def of_a_repeated_forward() -> list[tuple[Event, ...]]:
    """With another one in no_sync(), whose backward comes after its own."""
    played: list[tuple[Event, ...]] = [(REPEATED, 0)]
    for marked, how in itertools.product((True, False), (PLAIN, CHECKPOINT, WHOLE)):
        for which in (0, 1):
            other = Forward(which, marked, synced=False, how=how)
            played += [(REPEATED, other, 0, 1), (REPEATED, 0, other, 1)]
            first = dataclasses.replace(other, which=0)
            played.append((first, dataclasses.replace(REPEATED, which=which), 1, 0))
    return played


def test_a_pass_of_a_repeated_forward_ends_with_its_call() -> None:
    """It lacks the scale's gradient, which came before. The next call's is not of this pass."""
    found = ranks.run_ranks(
        2, play_all, args=(of_a_repeated_forward(),), timeout_s=100, preload=ranks.TORCH_DDP
    )
    for wrong in found.check().values():
        assert not wrong, "\n".join(wrong)


def play_all(rank: int, world_size: int, played: Sequence[tuple[Event, ...]]) -> list[str]:
    ours, torchs = (Wrappers("a scale beside", by_torch) for by_torch in (False, True))
    wrong = []
    for sequence in played:
        found, error = ours.play(sequence, rank)
        if found or "repeated forward() in backward" not in error or "'scale'" not in error:
            wrong.append(f"{spell(sequence)}: {found} {error}")
        if not torchs.play(sequence, rank)[1]:
            wrong.append(f"{spell(sequence)}: torch's wrapper raises nothing")
    return wrong


def of_a_static_graph(rank: int, world_size: int) -> str:
    model = wrap(nets_of("one module")[0], static_graph=True)
    with model.no_sync(), set_checkpoint_early_stop(False):
        batch = torch.full((2,), 1.0)
        out = checkpoint(model, batch, False, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RuntimeError) as caught:
        out.value.backward()
    return str(caught.value)


def test_the_first_pass_of_a_static_graph_names_no_parameter_that_came() -> None:
    found = ranks.run_ranks(2, of_a_static_graph, timeout_s=100, preload=ranks.TORCH_DDP)
    for error in found.values():
        assert "static_graph=True" in error
        assert "got none" not in error


def test_what_a_repeated_forward_asked_for_is_over_with_its_call() -> None:
    """It ends alike with either of the two wrappers made first."""
    repeats = Forward(0, marked=True, synced=False, how=WHOLE)
    others = [Forward(1, marked=False, synced=True, how=how) for how in (CHECKPOINT, WHOLE)]
    args = ("a scale beside", [(repeats, 0, each, 1) for each in others])
    found = ranks.run_ranks(2, walk, args=args, timeout_s=100, preload=ranks.TORCH_DDP)
    counts = (0, len(others), 0, 0, 0, 0, 0)
    assert found.values() == [([], dict(zip(ENDS, counts, strict=True)))] * 2


def of_one_wrapper(*hidden: Forward) -> list[tuple[Event, ...]]:
    """A marked forward in no_sync() that is repeated whole, and one of these, in both orders."""
    repeats = Forward(0, marked=True, synced=False, how=WHOLE)
    ends = ((0, 1), (1, 0))
    return [
        (*pair, *end) for one in hidden for pair in ((repeats, one), (one, repeats)) for end in ends
    ]


SYNCED = of_one_wrapper(Forward(0, marked=False, synced=True))
LOCAL = of_one_wrapper(
    Forward(0, marked=False, synced=False), Forward(0, marked=False, synced=False, how=CHECKPOINT)
)


@pytest.mark.parametrize(
    ("relation", "counts"),
    [
        ("one module", (12, 0, 0, 0, 0, 0, 0)),
        ("one module, weighed", (8, 0, 0, 0, 0, 4, 0)),
        ("a common trunk", (12, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_a_forward_that_backward_repeats_asks_for_its_own_call_alone(
    relation: str, counts: tuple[int, ...]
) -> None:
    args = (relation, SYNCED + LOCAL)
    found = ranks.run_ranks(2, walk, args=args, timeout_s=100, preload=ranks.TORCH_DDP)
    assert found.values() == [([], dict(zip(ENDS, counts, strict=True)))] * 2
