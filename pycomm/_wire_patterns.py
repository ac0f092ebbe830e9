"""The wire dtype of each parameter's gradient."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

import torch

from pycomm._settings import wire_dtype_name
from pycomm.errors import UnsupportedError

ENCODED = ("int8",)
"""Those that only pycomm's own all_reduce can add up."""
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)

WireDtype = str | torch.dtype | Mapping[str, str | torch.dtype | None] | None
"""What a caller may pass."""
Named = str | dict[str, str | None] | None
"""The same by name."""
_NAMES_SHOWN = 5


def named_wire_dtype(wire_dtype: WireDtype) -> Named:
    """The names of wire dtypes, as ``wire_dtype_name`` reads them.

    Needs no model.

    Raises:
        ValueError: A value names no wire dtype.
    """
    if isinstance(wire_dtype, Mapping):
        return {
            pattern: _name_of(f"wire_dtype[{pattern!r}]", dtype)
            for pattern, dtype in wire_dtype.items()
        }
    return _name_of("wire_dtype", wire_dtype)


def _name_of(where: str, dtype: str | torch.dtype | None) -> str | None:
    return None if dtype is None else wire_dtype_name(where, dtype, or_none=True)


def wire_dtypes(
    wire_dtype: Named,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    *,
    option: str = "",
) -> list[str | None]:
    """Each parameter's wire dtype, None for its own.

    Patterns are those of ``fnmatch``, in the mapping's order; the first that matches a name wins,
    and a name that none matches keeps its own dtype. ``option``: its name in errors.

    Raises:
        ValueError: A pattern applies to no parameter.
        UnsupportedError: A parameter is of a dtype that cannot be cast.
    """
    patterns = dict(wire_dtype) if isinstance(wire_dtype, Mapping) else {"*": wire_dtype}
    chosen: list[str | None] = []
    won: set[str] = set()
    for name in names:
        winner = next((each for each in patterns if fnmatch.fnmatchcase(name, each)), None)
        if winner is not None:
            won.add(winner)
        chosen.append(None if winner is None else patterns[winner])
    for pattern in patterns:
        if pattern not in won and isinstance(wire_dtype, Mapping):
            raise ValueError(_useless(pattern, list(patterns), names))
    for name, dtype, wire in zip(names, dtypes, chosen, strict=True):
        if wire is not None and dtype not in _CASTABLE:
            raise UnsupportedError(
                f"parameter {name!r} is {dtype}; {option or f'wire_dtype={wire!r}'} is for float32,"
                " float16 and bfloat16. A pattern of wire_dtype that gives it None lets it travel "
                "as it is."
            )
    return chosen


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
