"""PyTorch's DistributedTest suite as a module in which pycomm counts as a backend it knows.

The suite ships in the torch wheel and asks by name what a backend can do: ``BACKEND == "gloo"``.
Nothing of it is copied here: its source is read from the installed torch, its syntax tree changed
and compiled. There are two faces of it:

``gloo``   the tests that gloo runs. Wherever gloo is meant, pycomm is meant, too.
``nccl``   the tests that torch reserves for NCCL or for several GPUs, on CPU tensors: every request
           for a CUDA device gets the CPU. These ask for what gloo lacks: uneven all_gather, stacked
           outputs, lists of uneven shapes, sends to oneself.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

FACES = ("gloo", "nccl")
MODULE = "torch.testing._internal.distributed.distributed_test"
# Where the suite polls, it sleeps this long instead of 100 ms: there are three polls a test.
POLL_S = 0.005


def _names_backend(node: ast.expr) -> bool:
    """Whether an expression is what the suite compares with a backend's name."""
    if isinstance(node, ast.Name):
        return node.id in ("BACKEND", "backend")
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "dist.get_backend"


class _CountUs(ast.NodeTransformer):
    """Puts pycomm in wherever the suite names gloo, or, for the other face, NCCL."""

    def __init__(self, backend: str, face: str) -> None:
        self.backend = backend
        self.face = face
        self.changed = 0

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        right = node.comparators[0]
        if len(node.ops) != 1 or not _names_backend(node.left):
            return node
        if not (isinstance(right, ast.Constant) and right.value in FACES):
            return node
        if self.face == "nccl":
            # Here every backend passes for both.
            self.changed += 1
            return ast.copy_location(ast.Constant(isinstance(node.ops[0], ast.Eq)), node)
        if right.value != "gloo" or self.backend == "gloo":
            return node
        self.changed += 1
        names = ast.Tuple([right, ast.Constant(self.backend)], ast.Load())
        operator = ast.In() if isinstance(node.ops[0], ast.Eq) else ast.NotIn()
        return ast.copy_location(ast.Compare(node.left, [operator], [names]), node)

    def visit_Set(self, node: ast.Set) -> ast.AST:
        names = [each.value for each in node.elts if isinstance(each, ast.Constant)]
        if "gloo" in names and self.backend not in names:
            self.changed += 1
            node.elts.append(ast.Constant(self.backend))
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        # The groups that tests make beside the one they are about: ours, too.
        self.generic_visit(node)
        named = ast.unparse(node.value)
        gloo = named in ("dist.Backend.GLOO", "'gloo'")
        nccl = named in ("dist.Backend.NCCL", "'nccl'")
        if node.arg == "backend" and (gloo or (nccl and self.face == "nccl")):
            self.changed += 1
            node.value = ast.copy_location(ast.Name("BACKEND", ast.Load()), node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # In _run the suite asks whether NCCL has its GPUs.
        return node if node.name == "_run" else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        if node.name == "Barrier":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "time.sleep":
                    inner.args = [ast.Constant(POLL_S)]
        return node


class _QuickClock(types.ModuleType):
    """The module ``time`` for torch's test harness, which polls its children every 100 ms."""

    def __getattr__(self, name: str) -> Any:
        import time

        if name == "sleep":
            return lambda seconds: time.sleep(min(seconds, POLL_S))
        return getattr(time, name)


def load(backend: str, face: str, world_size: int, folder: Path) -> Any:
    """The suite's module; once a process, as the suite reads its settings while it is imported."""
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(world_size),
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder}/init",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    if importlib.util.find_spec("expecttest") is None:
        # torch's test classes derive from this one; the suite uses nothing of it.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    import torch.testing._internal.common_distributed as common

    for name in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[name].add(backend)
    common.time = _QuickClock("time")  # type: ignore[assignment]
    # torch skips tests of groups [1, 2] below 8 ranks; 3 are enough.
    if world_size >= 3:
        common.skip_if_small_worldsize = lambda test: test
    if face == "nccl":
        import cuda_on_cpu

        cuda_on_cpu.install(common)

    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    transformer = _CountUs(backend, face)
    tree = transformer.visit(ast.parse(Path(spec.origin).read_text()))
    if (backend, face) != ("gloo", "gloo"):
        assert transformer.changed > 20, "the suite names backends in a way not known here"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    code = compile(ast.fix_missing_locations(tree), spec.origin, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    for names in (
        module.PROFILING_SUPPORTED_BACKENDS,
        module.CUDA_PROFILING_SUPPORTED_BACKENDS,
        module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append(backend)
    return module
