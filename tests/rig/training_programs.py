"""Random training programs, small enough to be read: a model, options, and up to 14 steps.

A step that is not legal where it comes is left out by all ranks (``training_ranks.py``), so each
part of a program is a program, too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from training_models import PARTS

WRAPPER, LOCAL = "DistributedDataParallel", ("LocalSGD", "DiLoCo", "StreamingDiLoCo", "SparseLoCo")
SMALL = ("bf16", "fp16")
"""Parts with these dtypes, and those of float32, may travel in another."""
NO_WIRE = ("double", "complex", "sparse", "ignored")
HOOKS = ("", "", "", "allreduce", "again", "two futures", "asks", "metric")
CALLBACKS = (
    "of a sum",
    "two at once",
    "of a message",
    "of two sums",
    "nested",
    "of half the ranks",
    "average",
    "in backward",
)
"""What issues a collective in a callback, between steps or in a pass."""


@dataclasses.dataclass(frozen=True)
class Step:
    what: str
    how: str = ""
    part: int = -1
    without: tuple[tuple[int, ...], ...] = ()
    """Of a pass: the parts that each rank leaves out."""
    counts: tuple[int, ...] = ()
    """Of a join: each rank's number of batches."""
    weights: tuple[float, ...] = ()
    """Of a pass of ranks that are weighed: each one's samples; below 0: it has no batch."""

    def __str__(self) -> str:
        words = [self.what, self.how]
        if self.part >= 0:
            words.append(f"part {self.part}")
        if any(self.without):
            words.append(f"without {', '.join(str(list(each)) for each in self.without)}")
        if self.counts:
            words.append(f"of {list(self.counts)} batches")
        if self.weights:
            words.append(f"of weights {list(self.weights)}")
        return " ".join(word for word in words if word)


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    transport: str
    parts: tuple[str, ...]
    trainer: str
    options: tuple[tuple[str, Any], ...]
    hook: str
    steps: tuple[Step, ...]

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    def wire_of(self, part: int) -> str | None:
        """The dtype that a part's gradients travel in."""
        wire = self.option("wire_dtype")
        if isinstance(wire, dict):
            wire = wire.get(f"parts.{part}.*")
        return wire

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        hook = f", hook {self.hook!r}" if self.hook else ""
        return "\n".join(
            [
                f"seed {self.seed}: {self.ranks} ranks over {self.transport}",
                f"model: {', '.join(f'{i} {kind}' for i, kind in enumerate(self.parts))}",
                f"{self.trainer}({options}){hook}",
                *(f"  {step}" for step in self.steps),
            ]
        )


def smaller(program: Program) -> Iterator[Program]:
    """Without each step."""
    for index in reversed(range(len(program.steps))):
        steps = program.steps[:index] + program.steps[index + 1 :]
        yield dataclasses.replace(program, steps=steps)


def random_program(seed: int) -> Program:
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 4])
    trainer = WRAPPER if draw.random() < 0.85 else draw.choice(LOCAL)
    kinds = list(PARTS)
    parts = ["linear", *(draw.choice(kinds) for _ in range(draw.randint(1, 4)))]
    options: dict[str, Any] = {}
    hook = ""
    if trainer == WRAPPER:
        hook = _draw_wrapper(draw, parts, options)
    else:
        refused = ("ignored", "complex") if trainer == "SparseLoCo" else ("ignored",)
        parts = [kind for kind in parts if kind not in refused]
        options["sync_every"] = draw.choice([1, 2, 3])
        if trainer == "StreamingDiLoCo":
            options["fragment_sync_delay"] = draw.randrange(options["sync_every"])
    draw.shuffle(parts)
    if trainer == WRAPPER and (wire := options.pop("wire", None)):
        options["wire_dtype"] = _wire_dtype(draw, parts, wire)
        if options["wire_dtype"] is None:
            del options["wire_dtype"]
    steps = [_draw_step(draw, ranks, parts, trainer, options) for _ in range(draw.randint(5, 14))]
    return Program(
        seed=seed,
        ranks=ranks,
        transport=draw.choice(["auto", "tcp"]),
        parts=tuple(parts),
        trainer=trainer,
        options=tuple(options.items()),
        hook=hook,
        steps=tuple(steps),
    )


def _draw_wrapper(draw: random.Random, parts: list[str], options: dict[str, Any]) -> str:
    """Options, and the hook."""
    if draw.random() < 0.6:
        options["wire"] = draw.choice(["fp32", "bf16", "fp16", "int8", "int8"])
        if options["wire"] == "int8":
            parts.append("table")
            if draw.random() < 0.15:
                options["error_feedback"] = False
    graph = draw.choice(["", "find_unused_parameters", "find_unused_parameters", "static_graph"])
    if graph:
        options[graph] = True
    if graph != "static_graph":
        parts[:] = [kind for kind in parts if kind != "reentrant"]
    if draw.random() < 0.3:
        options["accumulate"] = draw.choice([2, 3])
    if draw.random() < 0.25:
        options["sync_every"] = draw.choice([2, 3])
    if draw.random() < 0.7:
        options["bucket_cap_mb"] = draw.choice([0.0003, 0.001, 0.02])
    if draw.random() < 0.3:
        options["gradient_as_bucket_view"] = False
    if draw.random() < 0.2:
        options["broadcast_buffers"] = False
    hook = "" if "sync_every" in options else draw.choice(HOOKS)  # theirs is the default group
    if draw.random() < 0.4:
        options["weight"] = "samples"
    return hook


def _wire_dtype(draw: random.Random, parts: list[str], wire: str) -> Any:
    able = [index for index, kind in enumerate(parts) if kind not in NO_WIRE]
    if len(able) == len(parts) and draw.random() < 0.5:
        return wire
    tables = [index for index in able if parts[index] == "table"]
    if wire == "int8" and tables:
        able = tables + [index for index in able if draw.random() < 0.3 and index not in tables]
    return {f"parts.{index}.*": wire for index in sorted(able)} or None


# By trainer: what people do, as often as that.
_OFTEN = {
    "pass": 10,
    "step": 6,
    "zero": 6,
    "full step": 8,
    "freeze": 3,
    "unfreeze": 3,
    "mode": 2,
    "look": 2,
    "stats": 1,
    "save": 1,
    "load": 1,
    "adopt": 1,
    "callback": 4,
    "await": 1,
    "sync": 2,
}
_WRAPPERS = {
    "local pass": 5,
    "unused forward": 2,
    "clip": 2,
    "scaled": 2,
    "dropped": 2,
    "copy": 1,
    "join": 2,
    "two backwards": 1,
    "derived": 2,
    "joined": 2,
    "hidden": 2,
    "past": 1,
    "unfreeze locally": 1,
    "careless": 0.3,
    "broken": 0.3,
}
_LOCALS = {"full step": 20, "resume": 2, "load alone": 2}
_WEIGHED = {"penalty": 4, "resume": 4, "local pass": 12}
WEIGHTS = (0.0, -1.0, 0.1, 1.0, 3.5, 7.0, 50.0, 1000.0)


def _draw_step(
    draw: random.Random, ranks: int, parts: list[str], trainer: str, options: dict[str, Any]
) -> Step:
    weighed = "weight" in options
    often = {
        **_OFTEN,
        **(_WRAPPERS if trainer == WRAPPER else _LOCALS),
        **(_WEIGHED if weighed else {}),
    }
    what = draw.choices(list(often), list(often.values()))[0]
    part = draw.randrange(len(parts))
    if what == "callback":
        return Step(what, draw.choice(CALLBACKS) + draw.choice(["", ", awaited"]))
    if what in ("pass", "local pass", "full step", "unused forward", "scaled", "careless"):
        without: tuple[tuple[int, ...], ...] = ()
        if options.get("find_unused_parameters"):
            alike = draw.random() < 0.5
            some = [_some(draw, parts) for _ in range(ranks)]
            without = tuple([some[0]] * ranks if alike else some)
        how = draw.choice(["", "one Inf"]) if what == "scaled" else ""
        weights: tuple[float, ...] = ()
        # Without any, the wrapper counts the rows of each rank's batch.
        counted = draw.random() < 0.3
        if weighed and not counted and what in ("pass", "local pass", "full step"):
            one = draw.choice(WEIGHTS)
            alike = draw.random() < 0.3
            weights = tuple(one if alike else draw.choice(WEIGHTS) for _ in range(ranks))
        only = part if what == "careless" else -1
        return Step(what, how, without=without, part=only, weights=weights)
    if what == "freeze" and trainer != WRAPPER:
        return Step(what, draw.choice(["", "", "on rank 0"]), part=part)
    if what in ("freeze", "unfreeze", "unfreeze locally"):
        return Step(what, part=part)
    if what == "derived":
        return Step(what, draw.choice(["", "", "in no_sync", "of two forwards"]))
    if what == "joined":
        return Step(what, draw.choice(["no_sync first", "no_sync last"]))
    if what == "past":
        return Step(what, draw.choice(["on all ranks", "on rank 0"]))
    if what == "zero":
        return Step(what, draw.choice(["to none", "to zeros"]))
    if what == "mode":
        return Step(what, draw.choice(["eval", "eval", "train"]))
    if what == "dropped":
        return Step(what, draw.choice(["one Inf", "forgotten"]))
    if what == "two backwards":
        return Step(what, draw.choice(["of one forward", "of two forwards", "in no_sync"]))
    if what == "join":
        counts = tuple(draw.randint(0, 3) for _ in range(ranks))
        return Step(what, draw.choice(["", "dividing by those left"]), counts=counts)
    return Step(what)


def _some(draw: random.Random, parts: list[str]) -> tuple[int, ...]:
    return tuple(index for index in range(len(parts)) if draw.random() < 0.4)
