"""docs/contract.md lists torch's private names that the source uses, and quotes torch's errors."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import ROOT, code, read, table
from ranks import run_ranks
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm._native import loader

# Of Python's library, Lightning, Accelerate, TorchRec and Transformers.
NOT_TORCHS = {
    *("_DummyThread", "_current_frames", "_exit", "_replace", "_actions"),
    *("_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_ddp_kwargs", "_models"),
    *("_output_segments_tensor", "_table_to_tbe_and_index"),
}


def section(name: str) -> str:
    page = read("docs/contract.md")
    return page.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


TORCHS = {
    name
    for each in (
        *(distributed_c10d, _distributed_c10d.ProcessGroup, _distributed_c10d.Backend.Options),
        *(torch.Tensor, torch.nn.Module),
    )
    for name in dir(each)
} | set(vars(torch.nn.Module()))


def used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names with what they are of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = (node.module or "").split(".") + [alias.name for alias in node.names]
            yield from (("torch", name) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of, name = node.args[:2]
            yield ast.unparse(of), name.value if isinstance(name, ast.Constant) else ""


def names_in_python() -> set[str]:
    """But for those that the wrapper has, too: they are in other rows."""
    files = [ROOT / "_pycomm_autoload.py", *(ROOT / "pycomm").rglob("*.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    own = {name for tree in trees for name in defined(tree)}
    return {
        name
        for tree in trees
        for of, name in used(tree)
        if private(name) and name not in NOT_TORCHS
        if name not in own or (name in TORCHS and of != "self")
    }


def overridden() -> set[str]:
    ours = [
        each
        for each in pycomm.DistributedDataParallel.__mro__
        if each.__module__.startswith("pycomm")
    ]
    return {
        name
        for each in ours
        for name in vars(each)
        if private(name) and hasattr(DistributedDataParallel, name) and name != "_abc_impl"
    }


def stands_in_for() -> set[str]:
    pairs: list[tuple[Any, Any]] = [
        (loader.native.Reducer, _distributed_c10d.Reducer),
        (loader.native.DdpLogger, _distributed_c10d.Logger),
    ]
    return {
        name
        for ours, theirs in pairs
        for name in vars(ours)
        if private(name) and hasattr(theirs, name) and "pybind11" not in name
    }


def in_cpp(pattern: str) -> set[str]:
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".h", ".cc", ".cu")]
    return {name for path in sources for name in re.findall(pattern, path.read_text())}


LISTS: dict[str, Callable[[], set[str]]] = {
    "read or called": names_in_python,
    "overridden in `pycomm.DistributedDataParallel`": overridden,
    "of torch's `Reducer` and `Logger`, in pycomm's own": stands_in_for,
    "in C++": lambda: in_cpp(r"(?:\bat::|[\w)](?:\.|->))(_(?!make_nccl)[a-z]\w*)\("),  # a hint's
    "headers below `torch/csrc`": lambda: in_cpp(r"#include <torch/csrc/(\S+)>"),
}


@pytest.mark.needs_native
def test_the_page_lists_the_private_names_of_torch() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|([^|]*)\|$", section("private"), re.M)
    listed = {row: set(code(names)) for row, names in rows if row in LISTS}
    assert listed == {row: find() for row, find in LISTS.items()}


def test_what_is_wrapped_is_listed() -> None:
    source = (ROOT / "pycomm" / "_native" / "callback_names.py").read_text()
    wrapped = set(re.findall(r"@functools\.wraps\(torch_(\w+)\)", source))
    assert wrapped == {"set_result", "then", "add_done_callback", "wait", "collect_all", "jit_wait"}
    row = next(line for line in read("docs/contract.md").splitlines() if "| first group |" in line)
    names = [f"`{each}`" for each in ("then", "add_done_callback", "wait", "set_result")]
    for name in (*names, "`torch._C.Future`", "`torch._C._collect_all`", "`torch._C.wait`"):
        assert name in row


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def refusals(rank: int, size: int, folder: str) -> dict[str, str]:
    world: Any = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert world.name() == "custom" and dist.get_backend() == "pycomm"
    assert backend._get_sequence_number_for_group() == 1
    found = {
        "`dist.monitored_barrier`": said(dist.monitored_barrier),
        "`ProcessGroup.monitored_barrier`": said(world.monitored_barrier),
        "`split_group` without an accelerator": said(
            lambda: dist.split_group(split_ranks=[[0], [1]])
        ),
        "sequence numbers of a group": said(world._get_sequence_number_for_group),
        "completion hooks": said(lambda: world._register_on_completion_hook(print)),
        "collectives' timing": said(world._enable_collectives_timing),
        "shrinking a group": said(lambda: backend.shrink([1])),
        "`dist.send` to oneself": said(lambda: dist.send(torch.ones(1), rank)),
        "`Work.block_current_stream`": said(work.block_current_stream),
        "`Work.get_future_result`": said(work.get_future_result),
    }
    dist.destroy_process_group()
    found["another backend's `pg_options`"] = said(
        lambda: dist.init_process_group(
            "pycomm",
            init_method=f"file://{folder}/other",
            rank=rank,
            world_size=size,
            pg_options=_distributed_c10d.Backend.Options("nccl"),
        )
    )
    return found


@pytest.mark.needs_native
def test_refused_calls_raise_what_the_page_quotes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run_ranks(2, refusals, args=(str(tmp_path),)).values()
    rows = dict(table(section("calls"), "call", "over pycomm"))
    for found in results:
        assert set(rows) == set(found)
        for call, error in found.items():
            (quoted, *_) = code(rows[call])
            assert error.startswith(quoted), (call, error)


def test_the_page_is_short() -> None:
    assert len(read("docs/contract.md").split()) <= 1450
