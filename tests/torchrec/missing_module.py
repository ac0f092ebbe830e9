"""Stands in for the one module that TorchRec's test bases import and its wheel does not have.

The bases draw sharders of EmbeddingBagCollection only, so nothing calls the class.
"""

from __future__ import annotations

import sys
from types import ModuleType

_NAME = "torchrec.distributed.tests"


class TestEmbeddingCollectionSharder:
    """Not part of the wheel."""

    __test__ = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{_NAME}.test_sequence_model is not in TorchRec's wheel")


def install() -> None:
    """Makes the module importable in this process, and in those forked from it."""
    package, module = ModuleType(_NAME), ModuleType(f"{_NAME}.test_sequence_model")
    package.__path__ = []
    vars(module)["TestEmbeddingCollectionSharder"] = TestEmbeddingCollectionSharder
    sys.modules.setdefault(package.__name__, package)
    sys.modules.setdefault(module.__name__, module)


install()
