"""TorchRec's sharded embedding tables over pycomm, on the CPU.

TorchRec's planner offers no row-wise sharding on the CPU. ``cpu_plan`` makes the plan that it
refuses; the rest is TorchRec's own:

    plan = pycomm.integrations.torchrec.cpu_plan(model, row_wise=["user"])
    model = torchrec.distributed.DistributedModelParallel(model, device=cpu, plan=plan)

``sharders`` sends rows as fp16, ``read_table`` collects a table for serving. The page to start
with is docs/torchrec.md.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from pycomm.integrations._torchrec_sharders import RELEASES, import_torchrec, sharders
from pycomm.integrations._torchrec_table import ID_MAPS, Table, read_table

if TYPE_CHECKING:
    from pycomm.integrations._torchrec_id_map import LRUManagedCollisionModule

__all__ = [
    "RELEASES",
    "LRUManagedCollisionModule",
    "Table",
    "cpu_plan",
    "read_table",
    "sharders",
]


def __getattr__(name: str) -> Any:
    if name == "LRUManagedCollisionModule":  # its base class is TorchRec's
        from pycomm.integrations import _torchrec_id_map

        return _torchrec_id_map.LRUManagedCollisionModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_VECTOR = 4  # fbgemm's kernels take rows whose length is a multiple of this


def cpu_plan(
    model: nn.Module,
    *,
    row_wise: Iterable[str] = (),
    column_wise: Iterable[str] = (),
    compute_kernel: str = "fused",
    world_size: int | None = None,
) -> Any:
    """Plans which rank holds which part of each embedding table of a model on the CPU.

    A table that is not named goes whole to the rank that holds the fewest bytes so far, the largest
    table first. A table with an id map (managed collision) is always cut by rows. The plan depends
    on the arguments only, so all ranks make the same one without communicating.

    Args:
        model: Has EmbeddingBagCollections or EmbeddingCollections, with or without managed
            collision. They may be on the device "meta".
        row_wise: Names of tables, or patterns such as "user_*": each rank holds an equal range of
            their rows. For tables that are too large for one rank.
        column_wise: The same, for equal ranges of columns. Each of these ranks then gets all ids.
        compute_kernel: "fused", which updates rows during backward. No other one is allowed.
        world_size: Default: that of the default group.

    Returns:
        A ``torchrec.distributed.types.ShardingPlan``, for ``DistributedModelParallel(plan=…)``.

    Raises:
        ImportError: TorchRec is not installed, or its kernels do not load with this torch.
        ValueError: A name fits no table, or a table cannot be cut as requested.
    """
    import_torchrec()
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.types import ShardingPlan

    if compute_kernel != "fused":
        raise ValueError(
            f"compute_kernel={compute_kernel!r}: only 'fused' is allowed on the CPU. There, "
            "TorchRec's dense kernel corrupts the memory of an EmbeddingCollection, and no other "
            "kernel exists. Try: leave compute_kernel out"
        )
    if world_size is None and not dist.is_initialized():
        raise ValueError("there is no default group. Try: init_process_group first, or world_size=")
    ranks = dist.get_world_size() if world_size is None else world_size
    modules = _embedding_modules(model)
    default_sharders = sharding_plan.get_module_to_default_sharders()
    tables = [
        _UncutTable(path, name, parameter, hasattr(module, ID_MAPS.partition(".")[0]))
        for path, module in modules.items()
        for name, parameter in default_sharders[type(module)].shardable_parameters(module).items()
    ]
    cuts = _cuts(tables, {"row_wise": row_wise, "column_wise": column_wise})
    _warn_without_optimizer(tables)

    loads = [0] * ranks
    generators: dict[str, dict[str, Any]] = {path: {} for path in modules}
    for table in tables:  # in the order of the modules, which TorchRec asserts
        generators[table.path][table.name] = None
    for table in sorted(tables, key=lambda each: -each.nbytes):
        cut = cuts[table]
        chosen = _chosen_ranks(table, cut, loads)
        for rank in chosen:
            loads[rank] += table.nbytes // len(chosen)
        if cut == "row_wise":
            generator = sharding_plan.row_wise(compute_kernel=compute_kernel)
        elif cut == "column_wise":
            generator = sharding_plan.column_wise(ranks=chosen, compute_kernel=compute_kernel)
        else:
            generator = sharding_plan.table_wise(rank=chosen[0], compute_kernel=compute_kernel)
        generators[table.path][table.name] = generator
    return ShardingPlan(
        plan={
            path: sharding_plan.construct_module_sharding_plan(
                module, generators[path], local_size=ranks, world_size=ranks, device_type="cpu"
            )
            for path, module in modules.items()
        }
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _UncutTable:
    """A table of the model, before it is sharded."""

    path: str
    """Of its module."""
    name: str
    parameter: nn.Parameter
    has_id_map: bool

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


def _embedding_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with tables, by path; none that is part of another."""
    from torchrec.distributed.sharding_plan import get_module_to_default_sharders
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    from pycomm.integrations._torchrec_id_map import LRUManagedCollisionModule

    known = (
        EmbeddingBagCollection,
        EmbeddingCollection,
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in found):
            continue
        if type(module) in known:
            found[path] = module
        elif type(module) in get_module_to_default_sharders():
            raise ValueError(
                f"{path or 'the model'} is a {type(module).__name__}. cpu_plan knows "
                f"{', '.join(each.__name__ for each in known)}"
            )
    if not found:
        raise ValueError("the model has no EmbeddingBagCollection and no EmbeddingCollection")
    for module in found.values():
        id_maps = module.get_submodule(ID_MAPS) if isinstance(module, known[2:]) else nn.Module()
        for name, id_map in id_maps.named_children():
            if not isinstance(id_map, (LRUManagedCollisionModule, MCHManagedCollisionModule)):
                raise ValueError(
                    f"the id map of table {name!r} is a {type(id_map).__name__}, which TorchRec "
                    "cannot train on the CPU. Try: pycomm's LRUManagedCollisionModule"
                )
    return found


def _cuts(tables: list[_UncutTable], options: dict[str, Iterable[str]]) -> dict[_UncutTable, str]:
    """How each table is cut: the name of an option, or "table_wise"."""
    cuts = {table: "row_wise" if table.has_id_map else "table_wise" for table in tables}
    for option, patterns in options.items():
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            named = [each for each in tables if fnmatch.fnmatchcase(each.name, pattern)]
            if not named:
                known = ", ".join(sorted(table.name for table in tables))
                raise ValueError(f"{option}: {pattern!r} fits no table. The tables are: {known}")
            for table in named:
                if option != "row_wise" and cuts[table] == "row_wise":
                    why = "it has an id map" if table.has_id_map else "row_wise names it, too"
                    raise ValueError(f"{option}: table {table.name!r} is cut by rows, as {why}")
                cuts[table] = option
    return cuts


def _chosen_ranks(table: _UncutTable, cut: str, loads: list[int]) -> list[int]:
    """The ranks that get a part of the table, in the order of the parts."""
    rows, columns = table.parameter.shape
    ranks = len(loads)
    if cut == "row_wise":
        if -(-rows // ranks) * (ranks - 1) >= rows:  # equal parts, rounded up, leave the last none
            raise ValueError(
                f"row_wise: table {table.name!r} has {rows} rows, too few to cut for {ranks} ranks"
            )
        return list(range(ranks))
    parts = 1
    if cut == "column_wise":
        fits = [count for count in range(2, ranks + 1) if columns % (count * _VECTOR) == 0]
        if not fits and ranks > 1:
            raise ValueError(
                f"column_wise: table {table.name!r} has {columns} columns, which cannot be cut for "
                f"2 to {ranks} ranks into equal parts of a multiple of {_VECTOR}"
            )
        parts = max(fits, default=1)
    return sorted(sorted(range(ranks), key=lambda rank: loads[rank])[:parts])


def _warn_without_optimizer(tables: list[_UncutTable]) -> None:
    """The fused kernel always updates rows: by TorchRec's default, unless told otherwise."""
    names = [t.name for t in tables if not hasattr(t.parameter, "_in_backward_optimizers")]
    if names:
        warnings.warn(
            f"no optimizer is applied in backward to: {', '.join(names)}. TorchRec updates such "
            "tables by SGD with lr=0.01, unless your sharder's fused_params set something else. "
            "Try: torch.distributed.optim._apply_optimizer_in_backward before cpu_plan",
            stacklevel=3,
        )
