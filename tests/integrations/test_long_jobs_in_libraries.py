"""Lightning, Accelerate and the Trainer in a long job: accumulation, save and resume, int8."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
from typing import Any

import pytest
import torch
from cases import case
from test_libraries import EPOCHS, EXACT, LR, SAMPLES, TRAINER_OPTIONS, Samples
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from training import BATCH, WIDTH, assert_close, digest, make_model, parameters_of
from versions import require

import pycomm
from pycomm._group import averaging

pytestmark = pytest.mark.needs_native

PRELOAD = ("torch._dynamo", "lightning.pytorch", "accelerate", "transformers.trainer")
ACCUMULATE = 2
SYNC_EVERY = 2
STEPS = EPOCHS * SAMPLES // BATCH
Encoded = tuple[dict[str, torch.Tensor], int, int]
INT8 = 1e-3
"""How far int8 may lead from one process in fp32."""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    for library in ("Lightning", "Accelerate", "HF Trainer"):
        require(library)


def model_of(wide: bool) -> nn.Module:
    """``wide``: gradients of at least 16 KiB, as fewer are never encoded."""
    if not wide:
        return make_model()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state that a checkpoint must hold."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


@functools.cache
def alone(wide: bool) -> dict[str, torch.Tensor]:
    """What one process comes to, without interruption, with the batches of both ranks and of all
    passes between two steps."""
    model, samples = model_of(wide), Samples()
    optimizer = sgd_of(model)
    whole = BATCH if wide else BATCH * ACCUMULATE
    for first in [*range(0, SAMPLES, whole)] * EPOCHS:
        part = slice(first, first + whole)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(samples.inputs[part]), samples.targets[part]).backward()
        optimizer.step()
    return parameters_of(model)


def assert_as_alone(values: list[dict[str, torch.Tensor]]) -> None:
    assert len({digest(value.values()) for value in values}) == 1, "ranks differ"
    assert_close(values[0], alone(wide=False), EXACT)


def and_sent(trained: dict[str, torch.Tensor]) -> Encoded:
    """With what this rank has sent encoded since the group was made."""
    stats = pycomm.codec_stats()
    return trained, stats.elements_sent, stats.bytes_sent


def assert_encoded(values: list[Encoded]) -> None:
    """Near what one process comes to in fp32; and every gradient has travelled as int8."""
    assert len({digest(trained.values()) for trained, _, _ in values}) == 1, "ranks differ"
    assert_close(values[0][0], alone(wide=True), INT8)
    elements = sum(each.numel() for each in values[0][0].values())
    for _, elements_sent, bytes_sent in values:
        assert elements_sent >= STEPS * elements
        assert 1.0 < bytes_sent / elements_sent < 1.02  # a byte, and a scale for 256 of them


# Lightning


def fit(rank: int, world_size: int, wide: bool, hosts: bool = False) -> Any:
    """``hosts``: each rank is a host of its own, and syncs every other step."""
    from lightning.pytorch import LightningModule, Trainer

    from pycomm.integrations.lightning import make_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(wide)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.model(batch["inputs"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return sgd_of(self)

        def on_train_epoch_end(self) -> None:
            if hosts:
                self.trainer.model.sync()

    options: dict[str, Any] = {"wire_dtype": "int8"} if wide else {}
    if hosts:
        options["sync_every"] = SYNC_EVERY

    def train(epochs: int, checkpoint: str | None = None) -> Any:
        """Trains up to so many epochs, with objects that have seen none but the checkpoint."""
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make_strategy(**options),
            accumulate_grad_batches=1 if options else ACCUMULATE,
            default_root_dir=os.environ["CASE_FOLDER"],
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # Lightning's own shuffles
        )
        sampler = DistributedSampler(Samples(), world_size, rank, shuffle=False)
        loader = DataLoader(Samples(), BATCH // 2, sampler=sampler)
        trainer.fit(Module(), loader, ckpt_path=checkpoint)
        return trainer

    with contextlib.redirect_stderr(io.StringIO()):
        if options:
            trainer = train(EPOCHS)
        else:
            trainer = train(EPOCHS, train(1).checkpoint_callback.best_model_path)
    trained = parameters_of(trainer.lightning_module.model)
    return and_sent(trained) if wide else trained


@case(fit, False, launcher="torchrun")
@pytest.mark.integration("Lightning", "accumulate_grad_batches, saved and resumed, as one process")
def test_lightning_accumulates_and_resumes(values: list[Any]) -> None:
    assert_as_alone(values)


def fit_on_two_hosts(rank: int, world_size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "host_identity", lambda: f"host {rank}")
        return fit(rank, world_size, False, hosts=True)


@case(fit_on_two_hosts, launcher="torchrun")
@pytest.mark.integration("Lightning", "sync_every=2, as two processes averaged by hand")
def test_lightning_syncs_every_other_step(values: list[Any]) -> None:
    assert len({digest(value.values()) for value in values}) == 1, "ranks differ"
    models, samples = [make_model(), make_model()], Samples()
    optimizers = [sgd_of(model) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            part = slice(step * BATCH % SAMPLES + rank, step * BATCH % SAMPLES + BATCH, 2)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(samples.inputs[part]), samples.targets[part]).backward()
            optimizer.step()
        if step % SYNC_EVERY == SYNC_EVERY - 1:
            for pair in zip(*(model.parameters() for model in models), strict=True):
                mean = (pair[0].detach() + pair[1].detach()) / 2
                for each in pair:
                    each.data.copy_(mean)
    assert_close(values[0], parameters_of(models[0]), EXACT)


@case(fit, True, launcher="torchrun")
@pytest.mark.integration("Lightning", "wire_dtype='int8', near one process")
def test_lightning_with_int8(values: list[Any]) -> None:
    assert_encoded(values)


# Accelerate


def accelerate_loop(rank: int, world_size: int, wide: bool) -> Any:
    from pycomm.integrations.accelerate import make_accelerator

    accelerator = make_accelerator(
        gradient_accumulation_steps=1 if wide else ACCUMULATE,
        **({"wire_dtype": "int8"} if wide else {}),
    )
    folder = os.environ["CASE_FOLDER"]

    def train(epochs: int, load: bool = False) -> Any:
        model = model_of(wide)
        loader = DataLoader(Samples(), BATCH // 2)
        model, optimizer, loader = accelerator.prepare(model, sgd_of(model), loader)
        if load:
            accelerator.load_state(folder)
        for batch in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch["inputs"]), batch["labels"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return model

    if wide:
        model = train(EPOCHS)
    else:
        train(1)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.free_memory()  # which forgets the first model
        model = train(EPOCHS - 1, load=True)
    trained = parameters_of(accelerator.unwrap_model(model))
    return and_sent(trained) if wide else trained


@case(accelerate_loop, False, launcher="torchrun")
@pytest.mark.integration("Accelerate", "accumulate(), saved and resumed, as one process")
def test_accelerate_accumulates_and_resumes(values: list[Any]) -> None:
    assert_as_alone(values)


@case(accelerate_loop, True, launcher="torchrun")
@pytest.mark.integration("Accelerate", "wire_dtype='int8', near one process")
def test_accelerate_with_int8(values: list[Any]) -> None:
    assert_encoded(values)


# Hugging Face Trainer


class WithLoss(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.model = model_of(wide)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.model(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def trained_by(kind: type[Any], arguments: Any, wide: bool, resume: bool = False) -> Any:
    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(Samples())

    model = WithLoss(wide)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = InOrder(
            model=model,
            args=arguments,
            train_dataset=Samples(),
            optimizers=(sgd_of(model), None),
        )
        trainer.train(resume_from_checkpoint=resume)
    return parameters_of(trainer.model.model)


def resume_trainer(rank: int, world_size: int) -> Any:
    from transformers import Trainer

    from pycomm.integrations.transformers import make_training_arguments

    options = TRAINER_OPTIONS | {
        "output_dir": os.environ["CASE_FOLDER"],
        "gradient_accumulation_steps": ACCUMULATE,
        "save_strategy": "epoch",
    }
    first = make_training_arguments(**{**options, "num_train_epochs": 1})
    trained_by(Trainer, first, wide=False)
    return trained_by(Trainer, make_training_arguments(**options), wide=False, resume=True)


@case(resume_trainer, launcher="torchrun")
@pytest.mark.integration(
    "HF Trainer", "gradient_accumulation_steps, saved and resumed, as one process"
)
def test_trainer_accumulates_and_resumes(values: list[Any]) -> None:
    assert_as_alone(values)


@dataclasses.dataclass
class ModelOptions:
    """A script's own."""

    wide: bool = False


def train_seq2seq(rank: int, world_size: int) -> Any:
    from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from pycomm.integrations.transformers import make_parser, make_training_arguments

    words = ["--wide", "--ddp_backend", "pycomm", "--output_dir", os.environ["CASE_FOLDER"]]
    own, rest = HfArgumentParser(ModelOptions).parse_args_into_dataclasses(
        words, return_remaining_strings=True
    )
    options = vars(make_parser(Seq2SeqTrainingArguments).parse_args(rest)) | TRAINER_OPTIONS
    arguments = make_training_arguments(
        arguments_class=Seq2SeqTrainingArguments, wire_dtype="int8", **options
    )
    assert type(arguments) is Seq2SeqTrainingArguments
    return and_sent(trained_by(Seq2SeqTrainer, arguments, own.wide))


@case(train_seq2seq, launcher="torchrun")
@pytest.mark.integration(
    "HF Trainer", "Seq2SeqTrainingArguments, own options, wire_dtype='int8', near one process"
)
def test_seq2seq_trainer_with_int8(values: list[Any]) -> None:
    assert_encoded(values)
