"""Which server keeps which part of which parameter."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

ALIGNMENT = 8192
"""Elements. A slice begins at a multiple of it; Paddle's ``slice_var_up`` uses the same number."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What placement has to know of a parameter."""

    name: str
    numel: int
    itemsize: int


@dataclasses.dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of a parameter, flattened; ``server`` keeps them."""

    name: str
    start: int
    stop: int
    server: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def place(shapes: Sequence[Shape], servers: int, *, sliced: bool = True) -> list[Slice]:
    """Divides parameters among servers by bytes; a pure function, so that all processes agree.

    Args:
        shapes: The parameters in the model's order.
        servers: How many servers there are.
        sliced: Cut a parameter of 2 x 8192 elements or more into up to ``servers`` slices. Without
            it each parameter is one slice.

    Returns:
        The slices in the order of ``shapes``. The largest was placed first, each on the server
        that had the fewest bytes, the lowest number among equals.
    """
    pieces: list[tuple[Shape, int, int]] = []
    for shape in shapes:
        blocks = -(-shape.numel // ALIGNMENT)
        parts = min(servers, shape.numel // ALIGNMENT) if sliced else 1
        step = -(-blocks // max(1, parts)) * ALIGNMENT
        if parts <= 1:
            pieces.append((shape, 0, shape.numel))
        else:
            pieces += [
                (shape, start, min(start + step, shape.numel))
                for start in range(0, shape.numel, step)
            ]
    loads = [0] * servers
    chosen = [0] * len(pieces)
    sizes = [(stop - start) * shape.itemsize for shape, start, stop in pieces]
    for index in sorted(range(len(pieces)), key=lambda index: (-sizes[index], index)):
        chosen[index] = min(range(servers), key=lambda server: (loads[server], server))
        loads[chosen[index]] += sizes[index]
    return [
        Slice(shape.name, start, stop, server)
        for (shape, start, stop), server in zip(pieces, chosen, strict=True)
    ]


def digest(slices: Sequence[Slice], parameters: Sequence[Any]) -> str:
    """Equal for two processes exactly if they have the same slices of the same parameters.

    ``parameters``: lists of [name, shape, dtype].
    """
    cuts = [f"{each.name} {each.start} {each.stop} {each.server}" for each in slices]
    text = "\n".join([*in_words(parameters), *cuts])
    return hashlib.sha256(text.encode()).hexdigest()


def in_words(parameters: Sequence[Any]) -> list[str]:
    """Each of a model's parameters, which are lists of [name, shape, dtype], as a text."""
    return [f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in parameters]


def first_difference(here: Sequence[str], there: Sequence[str]) -> str:
    """Where two models differ first. Each is what ``in_words()`` gives."""
    for mine, theirs in itertools.zip_longest(here, there, fillvalue="no further parameter"):
        if mine != theirs:
            return f"{mine} here, {theirs} there"
    return "none in names, shapes and dtypes"
