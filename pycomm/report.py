"""A picture of one training step: backward, buckets, the network, and the exposed part of it.

Example::

    recorder = pycomm.report.Recorder(model)
    for batch in first_few:
        train(batch)
    step = recorder.record(lambda: loss_of(model, batch).backward())
    pycomm.report.write("step.svg", {"pycomm": step})

A recorder takes pycomm's wrapper or torch's over any backend, so both can stand side by side.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Bucket", "Recorder", "Step", "picture", "write"]

_PATIENCE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The times of one bucket, in seconds since the step's first gradient.

    Example::

        for bucket in recorder.record(step).buckets:
            print(bucket.gradient_nbytes, bucket.reduced_s - bucket.launched_s)
    """

    gradient_nbytes: int
    wire_nbytes: int
    """Bytes that were sent, encoded if there is a codec."""
    first_gradient_s: float
    launched_s: float
    """All its gradients were there, and all buckets before it had left."""
    reduced_s: float
    """The network was done with it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One reduced backward pass on this rank.

    Example::

        took = recorder.record(step)
        print(f"sync {took.sync_s:.3f} s, {took.exposed_s:.3f} s of it not hidden by backward")
    """

    backward_s: float
    """When gradients had all been computed, in seconds since the first one."""
    ended_s: float
    """When all averages were in ``.grad``."""
    buckets: tuple[Bucket, ...]

    @property
    def exposed_s(self) -> float:
        """Time without computation: backward was over, the step was not."""
        return self.ended_s - self.backward_s

    @property
    def sync_s(self) -> float:
        """Time in which a bucket was being reduced: launched, and the network not done with it.

        Without the pauses in which backward had computed no bucket to launch.
        """
        total = until = 0.0
        for bucket in sorted(self.buckets, key=lambda one: one.launched_s):
            total += max(0.0, bucket.reduced_s - max(until, bucket.launched_s))
            until = max(until, bucket.reduced_s)
        return total

    @property
    def wire_nbytes(self) -> int:
        return sum(bucket.wire_nbytes for bucket in self.buckets)


class Recorder:
    """Follows the buckets of one wrapper.

    Example::

        recorder = pycomm.report.Recorder(model)

        def step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()

        print(recorder.record(step).exposed_s)

    Args:
        model: ``pycomm.DistributedDataParallel`` or torch's. With torch's, this
            registers a comm hook that averages as without one, so make the recorder before the
            first backward pass; there can be no other hook.

    Raises:
        TypeError: The model is not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(f"{type(model).__name__} is not wrapped: there are no buckets to see")
        self._model: Any = model
        self._native = hasattr(model.reducer, "record_steps")
        self._seen: list[dict[str, int]] = []
        self._first_ns: dict[int, int] = {}
        if not self._native:
            model.register_comm_hook(None, self._hook)
            for parameter in model.module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._arrived)

    def record(self, step: Callable[[], object]) -> Step:
        """Runs ``step()``, which holds one forward and one backward pass, and returns its record.

        Raises:
            RuntimeError: No gradients were reduced in it.
        """
        return self._record_native(step) if self._native else self._record_torch(step)

    def _record_native(self, step: Callable[[], object]) -> Step:
        self._model.reducer.record_steps(True)
        try:
            step()
        finally:
            self._model.reducer.record_steps(False)
        deadline = time.monotonic() + _PATIENCE_S
        raw = self._model.reducer.last_step()
        # The thread that notes the last bucket's end may be a moment late.
        while raw is not None and any(each["reduced_ns"] == 0 for each in raw["buckets"]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
            raw = self._model.reducer.last_step()
        if raw is None:
            raise RuntimeError("no gradients were reduced in this step")
        return _step(raw["buckets"], raw["backward_ended_ns"], raw["ended_ns"])

    def _record_torch(self, step: Callable[[], object]) -> Step:
        self._seen.clear()
        self._first_ns.clear()
        step()
        ended_ns = time.monotonic_ns()
        if not self._seen:
            raise RuntimeError("no gradients were reduced in this step")
        # The last bucket leaves when the last gradient is there.
        return _step(self._seen, max(each["launched_ns"] for each in self._seen), ended_ns)

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._first_ns[id(parameter)] = time.monotonic_ns()

    def _hook(self, state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
        buffer = bucket.buffer()
        now = time.monotonic_ns()
        # A parameter's own hook runs after its bucket's: the last one has not been noted yet.
        came = [self._first_ns.get(id(each), now) for each in bucket.parameters()]
        seen = {
            "gradient_nbytes": buffer.nbytes,
            "wire_nbytes": buffer.nbytes,
            "first_gradient_ns": min(came),
            "launched_ns": now,
            "reduced_ns": 0,
        }
        self._seen.append(seen)
        group = self._model.process_group
        buffer.div_(dist.get_world_size(group))
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()

        def reduced(done: Any) -> torch.Tensor:
            seen["reduced_ns"] = time.monotonic_ns()
            tensor: torch.Tensor = done.value()[0]
            return tensor

        return future.then(reduced)


def _step(buckets: list[dict[str, int]], backward_ended_ns: int, ended_ns: int) -> Step:
    zero = min(each["first_gradient_ns"] for each in buckets)

    def seconds(moment_ns: int) -> float:
        return (moment_ns - zero) / 1e9

    return Step(
        backward_s=seconds(backward_ended_ns),
        ended_s=seconds(ended_ns),
        buckets=tuple(
            Bucket(
                gradient_nbytes=each["gradient_nbytes"],
                wire_nbytes=each["wire_nbytes"],
                first_gradient_s=seconds(each["first_gradient_ns"]),
                launched_s=seconds(each["launched_ns"]),
                reduced_s=seconds(min(each["reduced_ns"] or ended_ns, ended_ns)),
            )
            for each in buckets
        ),
    )


_LEFT, _WIDTH, _ROW, _TOP = 180.0, 780.0, 13.0, 44.0

_STYLE = """
    .paper { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #57606a; font-size: 12px }
    .head { font-weight: 600 } .axis { stroke: #d0d7de }
    .compute { fill: #4c7d35 } .fills { fill: #b9d3a8 } .wire { fill: #3b6ea5 }
    .exposed { fill: #b3363b }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 }
      .axis { stroke: #30363d } .compute { fill: #85b86c } .fills { fill: #35502a }
      .wire { fill: #6ea8e0 } .exposed { fill: #e5777c }
    }
"""


def picture(steps: Mapping[str, Step]) -> str:
    """Steps under each other on one scale of time, as SVG text.

    Args:
        steps: By their names in the picture.

    Raises:
        ValueError: There are none.
    """
    if not steps:
        raise ValueError("there is no step to draw")
    longest = max(step.ended_s for step in steps.values())
    scale = _WIDTH / max(longest, 1e-9)
    parts: list[str] = []
    top = _TOP
    for name, step in steps.items():
        drawn, top = _panel(name, step, scale, top)
        parts += drawn
    return "\n".join([*_frame(top + 26.0, longest), *parts, "</svg>\n"])


def write(path: str | Path, steps: Mapping[str, Step]) -> None:
    """Writes ``picture(steps)`` to a file."""
    Path(path).write_text(picture(steps), encoding="utf-8")


def _frame(height: float, longest: float) -> list[str]:
    width = _LEFT + _WIDTH + 50
    legend = [
        ("compute", "backward"),
        ("fills", "bucket fills"),
        ("wire", "on the wire"),
        ("exposed", "exposed: backward is over"),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        ' role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif"'
        ' font-size="13">',
        '<title id="title">What happens in one training step</title>',
        '<desc id="desc">For each way of training a bar of backward and of what is exposed after '
        "it, and under it a bar for each bucket: when it fills, and when it is on the wire.</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
    ]
    x = _LEFT
    for kind, text in legend:
        lines.append(f'<rect class="{kind}" x="{x:.0f}" y="12" width="14" height="10"/>')
        lines.append(f'<text class="faint" x="{x + 20:.0f}" y="21">{text}</text>')
        x += 40 + 7 * len(text)
    for tick in range(5):
        at = _LEFT + _WIDTH * tick / 4
        lines.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="32" y2="{height - 20:.1f}"/>'
        )
        text = f"{1000 * longest * tick / 4:.0f} ms"
        lines.append(f'<text class="faint" x="{at - 12:.1f}" y="{height - 6:.1f}">{text}</text>')
    return lines


def _panel(name: str, step: Step, scale: float, top: float) -> tuple[list[str], float]:
    def bar(kind: str, y: float, begin: float, end: float, height: float) -> str:
        x, width = _LEFT + begin * scale, max((end - begin) * scale, 0.8)
        return (
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>'
        )

    said = [
        f"{step.wire_nbytes / 1e6:.1f} MB sent in",
        f"{len(step.buckets)} buckets;",
        f"exposed {1000 * step.exposed_s:.0f} ms of {1000 * step.ended_s:.0f}",
    ]
    lines = [f'<text class="ink head" x="8" y="{top + 14:.1f}">{escape(name)}</text>']
    lines += [
        f'<text class="faint" x="8" y="{top + 32 + 15 * row:.1f}">{text}</text>'
        for row, text in enumerate(said)
    ]
    lines.append(bar("compute", top, 0.0, step.backward_s, 18.0))
    lines.append(bar("exposed", top, step.backward_s, step.ended_s, 18.0))
    y = top + 24.0
    for bucket in step.buckets:
        lines.append(bar("fills", y, bucket.first_gradient_s, bucket.launched_s, _ROW - 3))
        lines.append(bar("wire", y, bucket.launched_s, bucket.reduced_s, _ROW - 3))
        y += _ROW
    return lines, max(y, top + 80.0) + 14.0
