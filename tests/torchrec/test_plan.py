"""Which rank gets which part of which table, and what is refused. No ranks are started."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from training import id_maps

from pycomm.integrations import _torchrec_sharders
from pycomm.integrations.torchrec import cpu_plan, read_table, sharders

META = torch.device("meta")
Sizes = dict[str, tuple[int, int]]
SIZES: Sizes = {"user": (1000, 8), "item": (400, 8), "place": (300, 8), "hour": (24, 8)}


def bags(sizes: Sizes) -> EmbeddingBagCollection:
    return _with_optimizer(EmbeddingBagCollection(tables=_tables(EmbeddingBagConfig, sizes)))


def single(sizes: Sizes) -> EmbeddingCollection:
    return _with_optimizer(EmbeddingCollection(tables=_tables(EmbeddingConfig, sizes)))


def mapped(sizes: Sizes) -> ManagedCollisionEmbeddingBagCollection:
    tables = _tables(EmbeddingBagConfig, sizes)
    collection = EmbeddingBagCollection(tables=tables)
    maps = ManagedCollisionCollection(id_maps(tables), tables)
    return _with_optimizer(ManagedCollisionEmbeddingBagCollection(collection, maps))


def _tables(config: Any, sizes: Sizes) -> list[Any]:
    return [
        config(name=name, num_embeddings=rows, embedding_dim=columns, feature_names=[name])
        for name, (rows, columns) in sizes.items()
    ]


def _with_optimizer(module: Any) -> Any:
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return module


def parts(plan: Any) -> dict[str, list[tuple[int, list[int], list[int]]]]:
    """By path and table: rank, offsets and sizes of each part. The kernel is always the fused."""
    found = {}
    for path, module in plan.plan.items():
        for name, table in module.items():
            assert table.compute_kernel == "fused"
            found[f"{path}:{name}"] = [
                (part.placement.rank(), part.shard_offsets, part.shard_sizes)
                for part in table.sharding_spec.shards
            ]
            assert [rank for rank, _, _ in found[f"{path}:{name}"]] == table.ranks
    return found


def test_tables_go_to_the_rank_with_the_fewest_bytes() -> None:
    model = nn.ModuleDict({"a": bags(SIZES), "b": single({"word": (500, 8)})})
    # Bytes: user 32,000, word 16,000, item 12,800, place 9,600, hour 768.
    assert parts(cpu_plan(model, world_size=2)) == {
        "a:user": [(0, [0, 0], [1000, 8])],
        "a:item": [(1, [0, 0], [400, 8])],
        "a:place": [(1, [0, 0], [300, 8])],
        "a:hour": [(0, [0, 0], [24, 8])],
        "b:word": [(1, [0, 0], [500, 8])],
    }


@pytest.mark.parametrize("make", [bags, single])
def test_rows_and_columns(make: Any) -> None:
    plan = cpu_plan(make(SIZES), row_wise=["user"], column_wise=["i*"], world_size=3)
    assert parts(plan) == {
        ":user": [(0, [0, 0], [334, 8]), (1, [334, 0], [334, 8]), (2, [668, 0], [332, 8])],
        # 8 columns are two parts of 4; they go to the ranks after equal parts of rows.
        ":item": [(0, [0, 0], [400, 4]), (1, [0, 4], [400, 4])],
        ":place": [(2, [0, 0], [300, 8])],
        ":hour": [(0, [0, 0], [24, 8])],
    }


def test_a_string_is_one_name_and_one_rank_is_enough() -> None:
    plan = cpu_plan(bags(SIZES), row_wise="user", column_wise="item", world_size=1)
    assert all(ranks == [0] for ranks in ([r for r, _, _ in each] for each in parts(plan).values()))


def test_a_table_with_an_id_map_is_cut_by_rows() -> None:
    plan = cpu_plan(nn.Sequential(mapped({"user": (1000, 8)})), world_size=2)
    assert parts(plan) == {"0:user": [(0, [0, 0], [500, 8]), (1, [500, 0], [500, 8])]}


def test_a_model_on_the_device_meta_has_the_same_plan() -> None:
    tables = _tables(EmbeddingBagConfig, SIZES)
    there = _with_optimizer(EmbeddingBagCollection(tables=tables, device=META))
    options: Any = {"row_wise": ["user"], "world_size": 2}
    assert parts(cpu_plan(there, **options)) == parts(cpu_plan(bags(SIZES), **options))


def test_torchrecs_planner_has_no_row_wise_plan() -> None:
    """What this module is for. Once this fails, the page and cpu_plan need a new reason."""
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        constraints={"user": ParameterConstraints(sharding_types=["row_wise"])},
    )
    with pytest.raises(RuntimeError, match=r"^No available sharding type and compute kernel"):
        planner.plan(bags({"user": (1000, 16)}), get_default_sharders())


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            bags(SIZES),
            {"row_wise": ["usr"]},
            "row_wise: 'usr' fits no table. The tables are: hour, item, place, user",
        ),
        (
            bags(SIZES),
            {"row_wise": ["user"], "column_wise": ["*"]},
            "column_wise: table 'user' is cut by rows, as row_wise names it, too",
        ),
        (
            mapped(SIZES),
            {"column_wise": ["user"]},
            "column_wise: table 'user' is cut by rows, as it has an id map",
        ),
        (
            bags({"few": (9, 8)}),  # 3, 3, 3 and 0
            {"row_wise": ["few"]},
            "row_wise: table 'few' has 9 rows, too few to cut for 4 ranks",
        ),
        (
            bags({"narrow": (90, 4)}),
            {"column_wise": ["narrow"]},
            "column_wise: table 'narrow' has 4 columns, which cannot be cut for 2 to 4 ranks into "
            "equal parts of a multiple of 4",
        ),
        (
            single(SIZES),
            {"compute_kernel": "dense"},
            "compute_kernel='dense': only 'fused' is allowed on the CPU. There, TorchRec's dense "
            "kernel corrupts the memory of an EmbeddingCollection, and no other kernel exists. "
            "Try: leave compute_kernel out",
        ),
        (
            nn.Linear(2, 2),
            {},
            "the model has no EmbeddingBagCollection and no EmbeddingCollection",
        ),
    ],
    ids=["name", "both", "id map", "rows", "columns", "dense", "no tables"],
)
def test_refused(model: nn.Module, options: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        cpu_plan(model, world_size=4, **options)
    assert str(caught.value) == text


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^there is no default group. Try: init_process_group"):
        cpu_plan(bags(SIZES))


def test_other_modules_with_tables_are_refused() -> None:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    fused = FusedEmbeddingBagCollection(
        tables=_tables(EmbeddingBagConfig, SIZES),
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
        device=META,
    )
    with pytest.raises(ValueError, match=r"^tower is a FusedEmbeddingBagCollection. cpu_plan "):
        cpu_plan(nn.ModuleDict({"tower": fused}), world_size=2)


def test_an_id_map_that_cannot_train_on_the_cpu_is_refused() -> None:
    tables = _tables(EmbeddingBagConfig, {"user": (1000, 8)})
    id_map = HashZchManagedCollisionModule(
        zch_size=1000, device=torch.device("cpu"), total_num_buckets=2
    )
    collection = ManagedCollisionCollection({"user": id_map}, tables)
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables), collection
    )
    with pytest.raises(ValueError) as caught:
        cpu_plan(model, world_size=2)
    assert str(caught.value) == (
        "the id map of table 'user' is a HashZchManagedCollisionModule, which TorchRec cannot "
        "train on the CPU. Try: pycomm's LRUManagedCollisionModule"
    )


def test_a_table_without_optimizer_is_named() -> None:
    model = EmbeddingBagCollection(tables=_tables(EmbeddingBagConfig, SIZES))
    apply_optimizer_in_backward(
        torch.optim.SGD, model.embedding_bags["user"].parameters(), {"lr": 0.1}
    )
    options: Any = {"row_wise": ["item"], "column_wise": ["place"], "world_size": 2}
    with pytest.warns(UserWarning) as caught:
        assert len(parts(cpu_plan(model, **options))) == len(SIZES)  # TorchRec's default: dense
    (warning,) = caught
    assert str(warning.message).startswith(
        "no optimizer is applied in backward to: item, place, hour. TorchRec updates such tables "
        "by SGD with lr=0.01, unless"
    )
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_plan(bags(SIZES), world_size=2)


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8"])
def test_other_wire_dtypes_are_refused(wire_dtype: str) -> None:
    with pytest.raises(ValueError) as caught:
        sharders(wire_dtype=wire_dtype)
    assert str(caught.value) == (
        f"wire_dtype='{wire_dtype}': on the CPU TorchRec sends 'fp32' (None) or 'fp16'"
    )


@pytest.mark.parametrize("wire_dtype", [None, "fp32", "fp16"])
def test_codecs_of_all_sharders(wire_dtype: str | None) -> None:
    made = sharders(wire_dtype=wire_dtype)
    assert [each.module_type.__name__ for each in made] == [
        "EmbeddingBagCollection",
        "EmbeddingCollection",
        "ManagedCollisionEmbeddingBagCollection",
        "ManagedCollisionEmbeddingCollection",
    ]
    for each in made:
        assert bool(each.qcomm_codecs_registry) == (wire_dtype == "fp16")


WAY = (
    "Try, in an environment of its own: pip install 'torch==2.13.*' --index-url "
    "https://download.pytorch.org/whl/cpu; pip install numpy 'setuptools>=77.0.3' ninja tensordict "
    "torchmetrics==1.0.3 pyre-extensions tqdm; pip install --no-deps torchrec==1.8.0 "
    "fbgemm-gpu-cpu==1.8.0; then pycomm, as docs/torchrec.md says"
)


def test_reading_a_table_that_is_not_sharded() -> None:
    with pytest.raises(KeyError, match=r"this one is not sharded\. Try: pass the Distributed"):
        read_table(bags(SIZES), "user")


def raises(error: Exception) -> Any:
    def load(*_: Any, **__: Any) -> Iterable[None]:
        raise error

    return load


def test_kernels_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """fbgemm-gpu-cpu 1.9.0 with torch 2.15.0, for one."""
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    monkeypatch.setattr(
        _torchrec_sharders.importlib,
        "import_module",
        raises(OSError("Could not load")),
    )
    with pytest.raises(ImportError) as caught:
        cpu_plan(bags(SIZES), world_size=2)
    assert str(caught.value) == (
        "TorchRec's CPU kernels (fbgemm-gpu-cpu) do not load with torch 2.15.0+cpu, since each of "
        f"their releases is built for one minor of torch. {WAY}"
    )


@pytest.mark.parametrize("missing", ["torchrec", "fbgemm_gpu"])
def test_not_installed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError(f"No module named {missing!r}", name=missing)
    monkeypatch.setattr(_torchrec_sharders.importlib, "import_module", raises(error))
    with pytest.raises(ImportError) as caught:
        sharders()
    assert str(caught.value) == (
        f"pycomm.integrations.torchrec needs {missing}, which is not installed. {WAY}"
    )


def test_the_release_tested_here_is_the_one_that_is_recommended() -> None:
    from pycomm._torch_range import torch_minor
    from pycomm.integrations.torchrec import RELEASES

    assert RELEASES[torch_minor(torch.__version__)] == torchrec.__version__
