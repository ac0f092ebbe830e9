"""The wire dtype of each parameter's gradient."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

import torch

from pycomm._settings import AS_THE_GROUP, wrapper_wire_dtype
from pycomm.errors import UnsupportedError

ENCODED = ("int8",)
"""Those that only pycomm's own all_reduce can add up."""
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)

WireDtype = str | torch.dtype | Mapping[str, str | torch.dtype | None] | None
"""What a caller may pass."""
Named = str | dict[str, str]
"""The same by name; "fp32" for None."""
_NAMES_SHOWN = 5


def named_wire_dtype(wire_dtype: WireDtype) -> Named:
    """The names of wire dtypes, as ``wrapper_wire_dtype`` reads them.

    Needs no model.

    Raises:
        ValueError: A value names no wire dtype.
    """
    if isinstance(wire_dtype, Mapping):
        return {
            pattern: wrapper_wire_dtype(f"wire_dtype[{pattern!r}]", dtype)
            for pattern, dtype in wire_dtype.items()
        }
    return wrapper_wire_dtype("wire_dtype", wire_dtype)


def wire_dtypes(
    wire_dtype: Named,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    *,
    of_group: str = "fp32",
    option: str = "",
) -> list[str | None]:
    """Each parameter's wire dtype, None for its own: so is "fp32".

    Patterns are those of ``fnmatch``, in the mapping's order; the first that matches a name wins,
    and a name that none matches keeps its own dtype. ``of_group``: the group's wire dtype, which
    float32 gradients take if they do as the group. ``option``: its name in errors.

    Raises:
        ValueError: A pattern applies to no parameter.
        UnsupportedError: A parameter is of a dtype that cannot be cast.
    """
    patterns = dict(wire_dtype) if isinstance(wire_dtype, Mapping) else {"*": wire_dtype}
    chosen: list[str] = []
    won: set[str] = set()
    for name in names:
        winner = next((each for each in patterns if fnmatch.fnmatchcase(name, each)), None)
        if winner is not None:
            won.add(winner)
        chosen.append("fp32" if winner is None else patterns[winner])
    for pattern in patterns:
        if pattern not in won and isinstance(wire_dtype, Mapping):
            raise ValueError(_useless(pattern, list(patterns), names))
    found: list[str | None] = []
    for name, dtype, wire in zip(names, dtypes, chosen, strict=True):
        if wire == AS_THE_GROUP:  # whose codec leaves other dtypes as they are, too
            wire = of_group if dtype is torch.float32 else "fp32"
        found.append(None if wire == "fp32" else wire)
        if found[-1] is not None and dtype not in _CASTABLE:
            raise UnsupportedError(
                f"parameter {name!r} is {dtype}; {option or f'wire_dtype={wire!r}'} is for float32,"
                " float16 and bfloat16. A pattern of wire_dtype that gives it None lets it travel "
                "as it is."
            )
    return found


def _useless(pattern: str, patterns: list[str], names: Sequence[str]) -> str:
    taken = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if taken:
        first = next(each for each in patterns if fnmatch.fnmatchcase(taken[0], each))
        return (
            f"wire_dtype: the pattern {pattern!r} decides nothing, because {first!r} stands before "
            f"it and matches {taken[0]!r} first; put the narrower one in front"
        )
    plain = pattern.replace("*", "").strip(".")
    near = difflib.get_close_matches(pattern, names, _NAMES_SHOWN, 0.4)
    near += [name for name in names if plain and plain in name and name not in near]
    shown = ", ".join(repr(name) for name in (near or list(names))[:_NAMES_SHOWN])
    return (
        f"wire_dtype: the pattern {pattern!r} matches no parameter; there are, for example, {shown}"
    )
