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
    EXACT,
    LR,
    SAMPLES,
    TRAINER_OPTIONS,
    Samples,
    WithLoss,
    assert_as_alone,
)
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, assert_close, digest, make_model, parameters_of
from versions import require

pytestmark = pytest.mark.needs_native

PRELOAD = ("torch._dynamo", "lightning.pytorch", "accelerate", "transformers.trainer")


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    for library in ("Lightning", "Accelerate", "HF Trainer"):
        require(library)


class Parts:
    """A batch sampler: of each 8 samples, 6 are the first rank's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, SAMPLES, BATCH):
            whole = list(range(begin, begin + BATCH))
            yield whole[:6] if self.rank == 0 else whole[6:]


def loader_of(rank: int) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_sampler=Parts(rank))


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
            trainer.fit(module, loader_of(rank))
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


class Summed(WithLoss):
    """Divides its loss by the tokens that it gets, as causal models do; these are elements."""

    def forward(self, inputs: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
        out = super().forward(inputs, labels)
        if num_items_in_batch is not None:
            out["loss"] = out["loss"] * labels.numel() / num_items_in_batch
        return out


class Ragged(Parts):
    """A step's two passes have 4 samples and 1 of each rank."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        mine = range(RAGGED)[self.rank :: 2]
        yield from (list(mine[:4]), list(mine[4:]))


RAGGED = 10


def trainer_loop(rank: int, world_size: int, ragged: bool) -> Any:
    """The subclass of docs/integrations.md."""
    from transformers import Trainer

    import pycomm
    from pycomm.integrations.transformers import make_training_arguments

    names: dict[str, Any] = {"Trainer": Trainer, "pycomm": pycomm}
    page = documents.blocks(documents.read("docs/integrations.md"), "python")
    exec(next(block for block in page if "class Weighed" in block), names)

    class Dealt(names["Weighed"]):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(Samples(), batch_sampler=(Ragged if ragged else Parts)(rank))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = {**TRAINER_OPTIONS, "output_dir": folder}
        arguments = make_training_arguments(
            **options, gradient_accumulation_steps=2 if ragged else 1
        )
        model = Summed() if ragged else WithLoss()
        trainer = Dealt(model=model, args=arguments, train_dataset=Samples())
        trainer.train()
        wrapped = type(trainer.model_wrapped) is pycomm.DistributedDataParallel
        return wrapped, parameters_of(trainer.model.model)


@case(trainer_loop, False, launcher="torchrun")
@pytest.mark.integration("HF Trainer", "unequal batches with weight='samples', as one process")
def test_trainer(values: list[Any]) -> None:
    assert [wrapped for wrapped, _ in values] == [True, True]
    assert_as_alone([parameters for _, parameters in values])


@case(trainer_loop, True, launcher="torchrun")
def test_trainer_whose_passes_are_not_alike(values: list[Any]) -> None:
    model, samples = make_model(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(samples.inputs[:RAGGED])
        nn.functional.mse_loss(out, samples.targets[:RAGGED]).backward()
        optimizer.step()
    trained = [parameters for _, parameters in values]
    assert len({digest(value.values()) for value in trained}) == 1, "ranks differ"
    assert_close(trained[0], parameters_of(model), EXACT)
