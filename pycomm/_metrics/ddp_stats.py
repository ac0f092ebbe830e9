"""The counters of a data-parallel wrapper, and the wrappers of this process that have some."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

AS_COUNTED = (
    "passes",
    "steps",
    "buckets_reduced",
    "overflowed_buckets",
    "underflowed_buckets",
    "nonfinite_buckets",
    "forgotten_residuals",
    "redone_steps",
    "lost_ranks",
    "left_ranks",
    "joined_ranks",
    "epochs",
    "shared_nbytes",
)
"""The counters that the reducer has under the same name."""

_numbers = itertools.count()
_wrappers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def add_wrapper(wrapper: Any) -> None:
    """Lists a wrapper for ``wrappers()``, until it is deleted."""
    _wrappers[wrapper] = next(_numbers)


def wrappers() -> list[tuple[Any, int]]:
    """Each wrapper that lives, with a number of its own in this process. Any thread."""
    while True:
        try:
            return list(_wrappers.items())
        except RuntimeError:  # another thread made one meanwhile
            continue


@dataclasses.dataclass(frozen=True)
class DDPStats:
    """Counters of one wrapper's reducer on this rank since it was made.

    Example::

        stats = model.stats()
        print(f"{stats.sent_nbytes / stats.steps:.0f} bytes and "
              f"{stats.exposed_seconds_per_step:.3f} s of waiting per step")
    """

    passes: int
    """Backward passes, but for those in ``no_sync()``."""
    steps: int
    """Of them, those whose gradients were reduced."""
    syncs: int
    """Times that parameters were averaged between hosts (``sync_every``)."""
    buckets_reduced: int
    wire_nbytes: int
    """Handed to all_reduce (or to the comm hook)."""
    sent_nbytes: int
    """What a ring all-reduce sends of it from one rank: 2(N-1)/N times as much. With ``sync_every``
    only what goes between hosts counts."""
    saved_nbytes: int
    """What one all-reduce a pass, in the parameters' own dtypes, would have sent more than that."""
    exposed_seconds: float
    """Time that backward had ended and waited for the network, and that averaging took."""
    exposed_seconds_per_step: float
    overflowed_buckets: int
    """fp16 buckets reduced a second time because the first scale was too large for them."""
    underflowed_buckets: int
    """The same because it was too small; usual in the first step only."""
    nonfinite_buckets: int
    """fp16 buckets with Inf or NaN among some rank's gradients before they were packed."""
    forgotten_residuals: int
    """Steps after which error feedback kept nothing, since an average was not finite: of this
    wrapper, or of another one in the same call of ``backward()``."""
    redone_steps: int
    """With ``elastic``: times that all buckets of a step were summed again."""
    lost_ranks: int
    """With ``elastic``: ranks that have died, or gone otherwise, since the model was wrapped."""
    left_ranks: int
    """With ``elastic``: ranks that have left in order (``model.elastic.leave()``)."""
    joined_ranks: int
    """With ``elastic``: processes that have joined since then."""
    epochs: int
    """With ``elastic``: the groups that there have been, the present one included; else 0."""
    agreeing_seconds: float
    """With ``elastic``: time in which steps and ``mean()`` waited until all members had finished,
    or, after a failure, until those who are left had agreed and had met."""
    meeting_seconds: float
    """With ``elastic``: time that the members of new groups took to meet. Training waits for it as
    a part of ``agreeing_seconds``, unless it computes meanwhile."""
    redoing_seconds: float
    """With ``elastic``: time in which steps were summed again."""
    shared_nbytes: int
    """Of the buckets as they are now, what the other ranks of this host reach in place; 0 where the
    ranks are on several hosts, or share no memory."""
    codec_overflows: int
    """Finite values that became infinite on this rank as int8: see ``codec_stats``, which
    counts all that the group does."""
