"""``weight="samples"`` in Lightning, Accelerate and the Trainer: batches that are not equal."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import documents
import pytest
import torch
from cases import case
from test_libraries import (
    EPOCHS,
    LR,
    SAMPLES,
    TRAINER_OPTIONS,
    Samples,
    WithLoss,
    assert_as_alone,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import BATCH, assert_close, digest, make_model, parameters_of
from versions import require

pytestmark = pytest.mark.needs_native

PRELOAD = ("torch._dynamo", "lightning.pytorch", "accelerate", "transformers.trainer")


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    for library in ("Lightning", "Accelerate", "HF Trainer"):
        require(library)


class Parts:
    """A batch sampler: of each 8 samples, 6 are the first rank's.

    With ``gaps`` it has all of every other batch, and the second rank puts any samples through.
    """

    def __init__(self, rank: int, gaps: bool = False) -> None:
        self.rank = rank
        self.gaps = gaps

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, SAMPLES, BATCH):
            whole = list(range(begin, begin + BATCH))
            if self.gaps and is_gap(begin // BATCH):
                yield whole if self.rank == 0 else [0, 5]
            else:
                yield whole[:6] if self.rank == 0 else whole[6:]


def is_gap(batch: int) -> bool:
    return batch % 2 == 1


def loader_of(rank: int, gaps: bool = False) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_sampler=Parts(rank, gaps))


# Lightning


def fit(rank: int, world_size: int, how: str) -> Any:
    from lightning.pytorch import LightningModule, Trainer

    from pycomm.integrations.lightning import make_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.automatic_optimization = not how.startswith("manual")

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if how == "said":
                self.trainer.model.samples = len(batch["inputs"])
            if how == "gaps" and rank == 1 and is_gap(index):
                self.trainer.model.samples = 0

        def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
            if how in ("said", "leaves that disagree"):
                return {**batch, "turned": batch["inputs"].T}
            return batch

        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            if self.automatic_optimization:
                return nn.functional.mse_loss(self.model(batch["inputs"]), batch["labels"])
            optimizer = self.optimizers()
            optimizer.zero_grad()
            times = 2 if how == "manual, twice a step" else 1
            for _ in range(times):
                loss = nn.functional.mse_loss(self.model(batch["inputs"]), batch["labels"])
                self.manual_backward(loss / times)
            optimizer.step()
            return None

        def on_train_end(self) -> None:
            self.trained = parameters_of(self.model)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LR)

    module = Module()
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make_strategy(weight="samples"),
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        try:
            trainer.fit(module, loader_of(rank, how == "gaps"))
        except ValueError as error:
            return str(error)
    return module.trained


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=case(fit, how, launcher="torchrun")) for how in ("a dict", "said")],
)
@pytest.mark.integration("Lightning", "unequal batches with weight='samples', as one process")
def test_lightning(how: str, values: list[Any]) -> None:
    assert_as_alone(values)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=case(fit, how, launcher="torchrun"))
        for how in ("manual", "manual, twice a step")
    ],
)
def test_lightning_that_calls_backward_itself(how: str, values: list[Any]) -> None:
    assert_as_alone(values)


@case(fit, "gaps", launcher="torchrun")
@pytest.mark.integration("Lightning", "a rank without a batch: any one with samples = 0")
def test_lightning_without_a_batch(values: list[Any]) -> None:
    assert_as_alone(values)


@case(fit, "leaves that disagree", launcher="torchrun")
@pytest.mark.integration("Lightning", "a batch whose samples cannot be counted")
def test_lightning_with_leaves_that_disagree(values: list[Any]) -> None:
    for text in values:
        assert "cannot tell how many samples forward got: argument 0['inputs']" in text
        assert "argument 0['turned']" in text and "model.samples = n" in text


# Accelerate


def accelerate_loop(rank: int, world_size: int) -> Any:
    from accelerate.data_loader import prepare_data_loader

    from pycomm.integrations.accelerate import make_accelerator

    accelerator = make_accelerator(weight="samples")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    loader = prepare_data_loader(
        loader_of(rank), accelerator.device, num_processes=1, process_index=0
    )
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch["inputs"])
            accelerator.backward(nn.functional.mse_loss(out, batch["labels"]))
            optimizer.step()
    return parameters_of(accelerator.unwrap_model(model))


@case(accelerate_loop, launcher="torchrun")
@pytest.mark.integration("Accelerate", "unequal batches with weight='samples', as one process")
def test_accelerate(values: list[Any]) -> None:
    assert_as_alone(values)


# Hugging Face Trainer


def subclass(name: str, batches: Any) -> Any:
    """Of docs/integrations.md."""
    from transformers import Trainer

    import pycomm

    page = documents.blocks(documents.read("docs/integrations.md"), "python")
    names = {"Trainer": Trainer, "DataLoader": DataLoader, "pycomm": pycomm, "my_batches": batches}
    exec(next(block for block in page if "class Weighed" in block), names)
    return names[name]


def train(kind: Any, model: nn.Module, passes: int, **options: Any) -> tuple[str, Any]:
    """Returns which wrapper it was, and the trained parameters."""
    from pycomm.integrations.transformers import make_training_arguments

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = make_training_arguments(
            **TRAINER_OPTIONS, output_dir=folder, gradient_accumulation_steps=passes
        )
        trainer = kind(model=model, args=arguments, **options)
        trainer.train()
        return type(trainer.model_wrapped).__module__.partition(".")[0], parameters_of(model)


def trainer_loop(rank: int, world_size: int) -> Any:
    model = WithLoss()
    wrapper, _ = train(subclass("Weighed", Parts(rank)), model, 1, train_dataset=Samples())
    return wrapper, parameters_of(model.model)


@case(trainer_loop, launcher="torchrun")
@pytest.mark.integration("HF Trainer", "unequal batches with weight='samples', as one process")
def test_trainer(values: list[Any]) -> None:
    assert [wrapper for wrapper, _ in values] == ["pycomm", "pycomm"]
    assert_as_alone([parameters for _, parameters in values])


WORDS = 11
ROWS = [3, 9, 4, 7, 2, 8, 5, 6, 12, 3]
"""The lengths of the rows in tokens."""
WITHOUT_LABELS = 4
PADDING = {"input_ids": 0, "labels": -100}
PASSES = 2
# By rank: of two steps, the rows of each pass. Row 4 has no labels, so it counts nothing.
DEALT = [[[0, 1, 2], [3], [5, 6], [7, 8]], [[8], [WITHOUT_LABELS], [9, 0, 3], [1]]]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Token numbers; rows have different lengths, and maybe a column that no model takes."""

    def __init__(self, **more: str) -> None:
        self.more = more
        generator = torch.Generator().manual_seed(5)
        self.rows = [torch.randint(1, WORDS, (length,), generator=generator) for length in ROWS]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        labels = torch.full_like(row, -100) if index == WITHOUT_LABELS else row
        return {"input_ids": row, "labels": labels, **self.more}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], True, PADDING[name])
        for name in rows[0]
    }


class Causal(nn.Module):
    """Each token predicts the next one, in float64, which the library's own models do not keep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)).double()

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        from transformers.loss.loss_utils import fixed_cross_entropy

        logits = self.layers(input_ids)
        wanted = labels[:, 1:].flatten()
        loss = fixed_cross_entropy(logits[:, :-1].flatten(0, 1), wanted, num_items_in_batch)
        return {"loss": loss, "logits": logits}


def causal_loop(rank: int, world_size: int) -> Any:
    kind = subclass("WeighedByTokens", DEALT[rank])
    options = {"train_dataset": Rows(text="a"), "data_collator": padded}
    return train(kind, Causal(), PASSES, **options)[1]


@case(causal_loop, launcher="torchrun")
@pytest.mark.integration("HF Trainer", "a causal model whose rows are not alike, as one process")
def test_trainer_counts_tokens(values: list[Any]) -> None:
    """Also of passes that accumulate, and of one without tokens on one rank."""
    assert len({digest(value.values()) for value in values}) == 1, "ranks differ"
    model, rows = Causal(), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for first in [*range(0, len(DEALT[0]), PASSES)] * EPOCHS:
        passes = [each for of_rank in DEALT for each in of_rank[first : first + PASSES]]
        optimizer.zero_grad()
        model(**padded([rows[index] for each in passes for index in each]))["loss"].backward()
        optimizer.step()
    assert_close(values[0], parameters_of(model), 1e-14)
