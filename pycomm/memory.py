"""Tensors that the ranks of one host reach in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm import errors
from pycomm._native import loader


def _sizes(size: tuple[int | Sequence[int], ...]) -> list[int]:
    """torch.empty's two ways of saying a size: (2, 3) and 2, 3."""
    if len(size) == 1 and isinstance(size[0], Sequence):
        given: Sequence[object] = size[0]
    else:
        given = size
    sizes: list[int] = []
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            raise errors.InvalidArgumentError(
                f"pycomm.empty{tuple(given)}: sizes are whole numbers of 0 or more, not {one!r}."
            )
        sizes.append(one)
    return sizes


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Makes a tensor that the other ranks of this host reach in place.

    It is an ordinary CPU tensor in every other respect. If all ranks of a group share a host and
    all pass such a tensor, or whole pages of one, large collectives make no copies:
    ``all_reduce`` adds from and writes to the ranks' tensors themselves, and
    ``all_gather_into_tensor``, ``reduce_scatter_tensor`` and ``broadcast`` read their inputs there.
    Otherwise it is communicated as any tensor is, with the same result.

    Args:
        *size: As for ``torch.empty``.
        dtype: Its dtype; torch's default dtype if not given.

    Returns:
        A contiguous CPU tensor. Its elements are zero.

    Raises:
        pycomm.errors.NoSharedMemoryError: There is no room, as in a container whose limit on memory
            is reached.
        pycomm.errors.PycommError: The system forbids shared memory; use ``torch.empty``.
        pycomm.errors.InvalidArgumentError: A size is no whole number of 0 or more.

    The memory is a multiple of the page size, made at once, and given back with the last reference.
    It counts as shared memory of this process. After ``fork()`` parent and child share its
    elements, as they would share a tensor after ``share_memory_()``. Any thread may call this. It
    costs about as much as writing zeros; make such tensors once, not every step.
    """
    sizes = _sizes(size)
    return loader.native.empty_shared(sizes, dtype or torch.get_default_dtype())
