"""A training step of TorchRec's sharded tables, over pycomm and over gloo.

    python tools/torchrec_tests.py --run benchmarks/torchrec_step.py --ranks 2,4

Each run is a set of new processes over one backend, which trains each model of the table for some
steps. The runs of all backends come in random order. A row has the median and the quartiles over
the runs, each of which counts by the median of its steps on rank 0, from the batch to the updated
rows. The losses of all backends are compared, run by run: the column is the largest relative
difference from gloo's, and above 1e-4 the program fails, or 1e-3 where rows travel as fp16, which
rounds sums in another order otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from launching import RankFailedError, add_rank_options, ran_as_rank, run_ranks
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import pycomm

TIMEOUT_S = 300.0
CPU = torch.device("cpu")
WARMUP = 5
TABLES = 8
COLUMNS = 16
IDS = 3  # per sample and table
LARGEST_DIFFERENCE = {None: 1e-4, "fp16": 1e-3}
MODELS = {
    # rows per table, how they are cut, wire dtype, id map
    "whole tables": (100_000, {}, None, False),
    "by rows": (100_000, {"row_wise": ["*"]}, None, False),
    "by columns": (100_000, {"column_wise": ["*"]}, None, False),
    "by rows, fp16": (100_000, {"row_wise": ["*"]}, "fp16", False),
    "id map": (10_000, {}, None, True),
}


def make_model(rows: int, id_map: bool) -> torch.nn.Module:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.modules import mc_embedding_modules, mc_modules
    from torchrec.optim import RowWiseAdagrad

    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(rows, COLUMNS, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(TABLES)
    ]
    bags = EmbeddingBagCollection(tables=tables, device=CPU)
    if id_map:
        policy = mc_modules.DistanceLFU_EvictionPolicy()
        maps = {
            table.name: mc_modules.MCHManagedCollisionModule(rows, CPU, policy, 10, 0)
            for table in tables
        }
        bags = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
            bags, mc_modules.ManagedCollisionCollection(maps, tables)
        )
    _apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.05})
    dense = torch.nn.Sequential(
        torch.nn.Linear(TABLES * COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    return torch.nn.ModuleDict({"bags": bags, "dense": dense})


def train(name: str, batch: int, steps: int) -> dict[str, Any]:
    """Seconds of each step of this rank, and its losses."""
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel

    from pycomm.integrations.torchrec import cpu_plan, sharders

    rows, cut, wire_dtype, id_map = MODELS[name]
    parts = make_model(rows, id_map)
    bags = DistributedModelParallel(
        parts["bags"],
        device=CPU,
        plan=cpu_plan(parts["bags"], **cut),
        sharders=sharders(wire_dtype=wire_dtype),
    )
    for key, tensor in bags.state_dict().items():  # the same rows, however they are cut
        if key.endswith(".weight"):
            for part in tensor.local_shards():
                first = part.metadata.shard_offsets[0]
                values = torch.arange(first, first + len(part.tensor)) % 1009
                part.tensor.detach().copy_((values / 1009 - 0.5).unsqueeze(1) / 10)
    dense = torch.nn.parallel.DistributedDataParallel(parts["dense"])
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.full((TABLES * batch,), IDS)
    names = [f"f{i}" for i in range(TABLES)]
    seconds, losses = [], []
    for step in range(WARMUP + steps):
        ids = torch.randint(rows, (TABLES * batch * IDS,), generator=draw)
        labels = (ids.view(TABLES, batch, IDS).sum((0, 2)) % 2).float()
        if id_map:
            ids = ids * 0x1E3779B97F4A7C15  # of either sign
        dist.barrier()
        began = time.perf_counter()
        features = KeyedJaggedTensor.from_lengths_sync(names, ids, lengths)
        found = bags(features)
        values = (found[0] if id_map else found).values()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            dense(values).squeeze(1), labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= WARMUP:
            seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    return {"median_s": statistics.median(seconds), "losses": losses}


def run_rank(backend: str, batch: int, steps: int, names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401 (before the group, so that ranks join at about the same time)

    name, _, transport = backend.partition(":")
    options = None
    if name == "pycomm":
        options = pycomm.Options(transport=transport or "auto")
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    dist.init_process_group(
        name,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        pg_options=options,
    )
    figures = {each: train(each, batch, steps) for each in names}
    store.set(f"done {dist.get_rank()}", "")
    store.wait([f"done {rank}" for rank in range(dist.get_world_size())])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", default="2,4", help="default: %(default)s")
    add("--backends", default="pycomm,pycomm:tcp,gloo", help="gloo must be among them")
    add("--models", default=";".join(MODELS), help="default: %(default)s")
    add("--batch", type=int, default=1024, help="samples per rank; default: %(default)s")
    add("--steps", type=int, default=30, help="default: %(default)s")
    add("--runs", type=int, default=5, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the order; default: %(default)s")
    add("--one", help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()
    names = options.models.split(";")
    if ran_as_rank(options, lambda: run_rank(options.one, options.batch, options.steps, names)):
        sys.stdout.flush()
        os._exit(0)  # one of gloo's threads now and then aborts at exit
    facts = header("torchrec_step", sys.argv[1:])
    facts["pycomm"] = pycomm.__version__  # it is not installed here, but on the path
    facts["torchrec"] = metadata.version("torchrec")
    for key, value in facts.items():
        print(f"# {key:14s} {value}")
    print(
        f"# {TABLES} tables of {COLUMNS} columns, {IDS} ids per sample and table, {options.batch} "
        f"samples per rank, row-wise Adagrad; {options.runs} runs of {options.steps} steps"
    )
    columns = f"{'median':>8s} {'q1':>8s} {'q3':>8s}"
    print(f"{'model':14s} {'ranks':>5s} {'backend':11s} {columns}  ms/step  loss difference")
    os.environ["OMP_NUM_THREADS"] = "1"
    backends = options.backends.split(",")
    for ranks in map(int, options.ranks.split(",")):
        order = [each for each in backends for _ in range(options.runs)]
        random.Random(options.seed + ranks).shuffle(order)
        print(f"# order of the runs with {ranks} ranks: {' '.join(order)}", flush=True)
        found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
        for backend in order:
            lines: list[bytes] = []
            argv = ["--one", backend, "--models", options.models]
            argv += ["--batch", str(options.batch), "--steps", str(options.steps)]
            try:
                run_ranks(ranks, argv, TIMEOUT_S, lines.append)
            except RankFailedError as error:
                print(f"{backend}, {ranks} ranks: {error}", file=sys.stderr)
                return 1
            found[backend].append(json.loads(lines[0]))
        for name in names:
            right = found["gloo"][0][name]["losses"]
            for backend in backends:
                medians = [1e3 * run[name]["median_s"] for run in found[backend]]
                q1, median, q3 = statistics.quantiles(medians, n=4, method="inclusive")
                difference = max(
                    abs(mine - gloos) / abs(gloos)
                    for run in found[backend]
                    for mine, gloos in zip(run[name]["losses"], right, strict=True)
                )
                print(
                    f"{name:14s} {ranks:5d} {backend:11s} {median:8.2f} {q1:8.2f} {q3:8.2f}"
                    f"           {difference:.1e}",
                    flush=True,
                )
                if not difference <= LARGEST_DIFFERENCE[MODELS[name][2]]:
                    print(f"{name}, {backend}: the losses are not gloo's", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
