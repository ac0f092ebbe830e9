"""Collectives as plain values: what to call, on what, and what must come out of it.

A ``Call`` says everything about one collective of one group: inputs are made from its seed, so
every rank can work out, alone, what each rank's result must be. The reference is numpy: exact
integers, float64 (or wider) and complex128. ``programs.py`` runs calls on real ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVEMENTS = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
COLLECTIVES = [*REDUCTIONS, *MOVEMENTS, "barrier"]
# Those whose parts may have different sizes.
UNEVEN = ["all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"]
# Those that give every rank the same result.
ALIKE = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"]

VALUES = ["whole", "wide", "special"]
_FACTORS = [
    0.5,
    2.0,
    1.0,
    0.25,
    -1.0,
]  # of PREMUL_SUM: powers of two cost no rounding

# Half the distance of 1.0 to the next number: what one rounding may cost, relatively; and the
# smallest number above zero, below which a rounding costs that much absolutely.
_ROUNDING = {
    torch.float8_e4m3fn: (2.0**-4, 2.0**-9),
    torch.float8_e5m2: (2.0**-3, 2.0**-16),
    torch.float16: (2.0**-11, 2.0**-24),
    torch.bfloat16: (2.0**-8, 2.0**-133),
    torch.float32: (2.0**-24, 2.0**-149),
    torch.float64: (2.0**-53, 2.0**-1074),
    torch.complex64: (2.0**-24, 2.0**-149),
    torch.complex128: (2.0**-53, 2.0**-1074),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective, the same on every rank of its group."""

    collective: str
    group: tuple[int, ...]
    """Global ranks, ascending."""
    dtype: str = "float32"
    op: str = "SUM"
    numel: int = 1
    """Elements of the tensor, or of one rank's part."""
    extra: tuple[int, ...] = ()
    """For uneven parts: elements that part i has more than ``numel``. Empty: even."""
    root: int = 0
    """Index into ``group``."""
    asynchronous: bool = False
    waits: tuple[int, int] = (0, 0)
    """After how many more calls even and odd ranks wait for it."""
    values: str = "whole"
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.group)

    def part(self, member: int, of: int = 0) -> int:
        """Elements of a member's part; in an all_to_all, of what ``of`` sends to it."""
        if not self.extra or self.collective not in UNEVEN:
            return self.numel
        index = 2 * of + member if self.collective.startswith("all_to_all") else member
        return self.numel + self.extra[index % len(self.extra)]

    def parts(self, of: int = 0) -> list[int]:
        return [self.part(member, of) for member in range(self.size)]

    def refusal(self) -> str:
        """Why the call has no meaning, in the words of its error; "" if it has one."""
        if self.collective not in REDUCTIONS:
            return ""
        dtype = DTYPES[self.dtype]
        if self.op in ("AVG", "PREMUL_SUM") and not (dtype.is_floating_point or dtype.is_complex):
            return f"{self.op} of {self.dtype} is undefined"
        if self.op in ("BAND", "BOR", "BXOR") and dtype.is_floating_point:
            return f"{self.op} of "
        if dtype.is_complex and self.op in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            if self.collective == "all_reduce":
                return f"does not support RedOpType.{self.op} on complex tensors"  # torch's words
            return "" if self.op == "PRODUCT" else f"{self.op} of "
        return ""


def _integers(rng: np.random.Generator, numel: int, dtype: torch.dtype, values: str) -> Any:
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, numel).astype(bool))
    if values == "whole":
        return torch.from_numpy(rng.integers(0, 5, numel)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    raw = np.frombuffer(rng.bytes(numel * dtype.itemsize), name)
    return torch.from_numpy(raw.copy())  # any bits at all: sums wrap around


def _floats(rng: np.random.Generator, numel: int, dtype: torch.dtype, values: str) -> Any:
    if values == "whole":
        # Not zero, so that no product is; and so small that any sum or product of five is exact.
        drawn = rng.choice([-1.0, 1.0] if dtype.itemsize == 1 else [-2.0, -1.0, 1.0, 2.0], numel)
    else:
        drawn = rng.standard_normal(numel) * 2.0 ** rng.integers(-3, 3, numel)
    if values == "special" and dtype.itemsize > 1:
        spots = rng.random(numel) < 0.2
        drawn[spots] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], int(spots.sum()))
    return torch.from_numpy(drawn).to(dtype)


def make_tensor(call: Call, member: int, numel: int) -> torch.Tensor:
    """The input of one member: the same for everybody who asks."""
    rng = np.random.default_rng([call.seed, member])
    dtype = DTYPES[call.dtype]
    if dtype.is_complex:
        values = "wide" if call.values == "special" else call.values
        parts = [_floats(rng, numel, torch.float64, values) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    make = _floats if dtype.is_floating_point else _integers
    tensor: torch.Tensor = make(rng, numel, dtype, call.values)
    return tensor


def input_numel(call: Call, member: int) -> int:
    """Elements of one member's input, all parts together."""
    if call.collective == "barrier":
        return 0
    if call.collective in ("reduce_scatter", "reduce_scatter_tensor"):
        return sum(call.parts())
    if call.collective.startswith("all_to_all"):
        return sum(call.parts(member))
    if call.collective == "scatter":
        return sum(call.parts()) if member == call.root else 0
    if call.collective in ("all_reduce", "reduce", "broadcast"):
        return call.numel
    return call.part(member)


def exact(tensor: torch.Tensor) -> Any:
    """The numbers as numpy has them, wider where that loses nothing."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).numpy()
    return tensor.numpy()


def _fold(call: Call, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    """What the reduction gives, and how far off it may be."""
    dtype = DTYPES[call.dtype]
    terms = np.stack([exact(tensor) for tensor in tensors])
    if dtype is torch.bool:
        fold = {"SUM": np.any, "MAX": np.any, "BOR": np.any, "BXOR": np.logical_xor.reduce}
        return fold.get(call.op, np.all)(terms, axis=0), None
    integer = {
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    if not (dtype.is_floating_point or dtype.is_complex):
        return integer.get(call.op, np.add).reduce(terms, axis=0, dtype=terms.dtype), None
    if call.op in ("MIN", "MAX"):
        return integer[call.op].reduce(terms, axis=0), None
    relative, absolute = _ROUNDING[dtype]
    wide: Any = terms.astype(np.clongdouble if dtype.is_complex else np.longdouble)
    with np.errstate(all="ignore"):
        if call.op == "PRODUCT":
            wanted, scale = np.multiply.reduce(wide, axis=0), np.multiply.reduce(np.abs(wide), 0)
            roundings = 4 * call.size if dtype.is_complex else call.size
        else:
            if call.op == "PREMUL_SUM":
                wide = wide * np.array(_FACTORS[: call.size])[:, None]
            wanted, scale = wide.sum(0), np.abs(wide).sum(0)
            roundings = call.size - 1 if call.op == "SUM" else call.size + (call.op == "AVG")
            if call.op == "AVG":
                wanted, scale = wanted / call.size, scale / call.size
        rounds = call.op == "AVG" or (call.op == "PREMUL_SUM" and dtype.itemsize == 1)
        if call.values == "whole" and not rounds:
            return wanted, None
        return wanted, scale * relative * roundings * 1.05 + absolute * roundings * 2


def _inputs(call: Call) -> list[torch.Tensor]:
    return [make_tensor(call, each, input_numel(call, each)) for each in range(call.size)]


def _terms(call: Call, member: int) -> list[torch.Tensor]:
    """What a reduction folds into the member's output, by rank."""
    if not call.collective.startswith("reduce_scatter"):
        return _inputs(call)
    begin = sum(call.parts()[:member])
    return [each[begin : begin + call.part(member)] for each in _inputs(call)]


def expected(call: Call, member: int) -> tuple[Any, Any] | None:
    """What the member's output must hold and how far off it may be (None: exactly that).

    None where the member gets nothing.
    """
    kind = call.collective
    if kind == "barrier" or (kind in ("reduce", "gather") and member != call.root):
        return None
    if kind in ("all_reduce", "reduce") or kind.startswith("reduce_scatter"):
        return _fold(call, _terms(call, member))
    inputs = _inputs(call)
    if kind == "broadcast":
        return exact(inputs[call.root]), None
    if kind == "scatter":
        return exact(inputs[call.root].split(call.parts())[member]), None
    if kind.startswith("all_to_all"):
        inputs = [inputs[each].split(call.parts(each))[member] for each in range(call.size)]
    return np.concatenate([exact(each) for each in inputs]), None


def _may_overflow(call: Call, member: int) -> Any:
    """Where a product of some of the ranks' values is more than the dtype holds.

    e4m3 holds 448 at most and has no infinity: what is more is NaN there, and stays it.
    """
    terms = _terms(call, member)
    sizes = np.abs(np.stack([exact(each) for each in terms]).astype(np.longdouble))
    with np.errstate(all="ignore"):
        return np.multiply.reduce(np.maximum(sizes, 1), axis=0) > torch.finfo(terms[0].dtype).max


def difference(call: Call, output: torch.Tensor, member: int) -> str:
    """Describes how a member's output is wrong, "" if it is right."""
    wanted_and_allowed = expected(call, member)
    if wanted_and_allowed is None:
        return ""
    wanted, allowed = wanted_and_allowed
    got = exact(output)
    if got.shape != wanted.shape:
        return f"shape {got.shape} instead of {wanted.shape}"
    nan = np.isnan(wanted) if wanted.dtype.kind in "fc" else np.zeros(wanted.shape, bool)
    if allowed is None:
        right = got == wanted
    else:
        with np.errstate(invalid="ignore"):
            right = (got == wanted) | (np.abs(got - wanted) <= allowed)
        if call.op == "PRODUCT" and output.dtype.itemsize == 1 and not right.all():
            right |= _may_overflow(call, member) & ~np.isfinite(got)
    if nan.any():
        right = np.where(nan, np.isnan(got), right)
    if right.all():
        return ""
    where = int(np.argmin(right))
    many = int((~right).sum())
    return f"{many} of {right.size} wrong: [{where}] is {got[where]}, must be {wanted[where]}"


def reduce_op(call: Call, member: int) -> Any:
    if call.op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(_FACTORS[member])
    return getattr(dist.ReduceOp, call.op)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's memory; an empty one cannot be viewed as another dtype."""
    if tensor.numel() == 0:
        return b""
    raw: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return raw


@dataclasses.dataclass
class Launched:
    """A call under way on one rank."""

    work: Any
    output: torch.Tensor
    source: torch.Tensor
    before: torch.Tensor
    """What ``source`` held; the call must not change it unless it is the output too."""
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """For list forms: the output tensors."""

    def result(self) -> torch.Tensor:
        return torch.cat(self.tensors) if self.tensors else self.output

    def source_is_unchanged(self) -> bool:
        if self.source is self.output:
            return True
        return bits(self.source) == bits(self.before)


def launch(call: Call, member: int, group: Any) -> Launched:
    """Starts the call. Raises what the call raises."""
    dtype, kind = DTYPES[call.dtype], call.collective
    roots = {"group": group, "async_op": call.asynchronous}
    root = call.group[call.root]
    source = make_tensor(call, member, input_numel(call, member))
    before = source.clone()
    is_root = member == call.root

    def empty(numel: int) -> torch.Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        tensor.untyped_storage().fill_(0x5A)
        return tensor

    tensors: list[torch.Tensor] = []
    output = source
    if kind == "barrier":
        work = dist.barrier(**roots)
    elif kind == "all_reduce":
        work = dist.all_reduce(output, op=reduce_op(call, member), **roots)
    elif kind == "reduce":
        work = dist.reduce(output, root, op=reduce_op(call, member), **roots)
    elif kind == "broadcast":
        if not is_root:
            output = source = empty(call.numel)
        work = dist.broadcast(output, root, **roots)
    elif kind == "all_gather":
        tensors = [empty(part) for part in call.parts()]
        work = dist.all_gather(tensors, source, **roots)
    elif kind == "all_gather_into_tensor":
        output = empty(call.numel * call.size)
        work = dist.all_gather_into_tensor(output, source, **roots)
    elif kind == "gather":
        tensors = [empty(part) for part in call.parts()] if is_root else []
        work = dist.gather(source, tensors if is_root else None, root, **roots)
    elif kind == "scatter":
        output = empty(call.part(member))
        parts = list(source.split(call.parts())) if is_root else None
        work = dist.scatter(output, parts, root, **roots)
    elif kind == "reduce_scatter":
        output = empty(call.part(member))
        parts = list(source.split(call.parts()))
        work = dist.reduce_scatter(output, parts, op=reduce_op(call, member), **roots)
    elif kind == "reduce_scatter_tensor":
        output = empty(call.numel)
        work = dist.reduce_scatter_tensor(output, source, op=reduce_op(call, member), **roots)
    elif kind == "all_to_all_single":
        outgoing = call.parts(member)
        arriving = [call.part(member, each) for each in range(call.size)]
        output = empty(sum(arriving))
        splits = (arriving, outgoing) if call.extra else (None, None)
        work = dist.all_to_all_single(output, source, *splits, **roots)
    else:
        assert kind == "all_to_all", kind
        tensors = [empty(call.part(member, each)) for each in range(call.size)]
        work = dist.all_to_all(tensors, list(source.split(call.parts(member))), **roots)
    return Launched(work if call.asynchronous else None, output, source, before, tensors)
