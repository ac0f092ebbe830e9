"""Train with Lightning: its Trainer takes pycomm as a strategy.

pip install lightning==2.6.6 scikit-learn
torchrun --nproc-per-node=2 examples/with_lightning.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pycomm.integrations.lightning import make_strategy

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


seed_everything(0)
trainer = Trainer(
    accelerator="cpu",
    devices=2,  # ranks per host, as torchrun's --nproc-per-node
    # fp16 pays between hosts; on one host leave wire_dtype out.
    # torch's wrapper: DDPStrategy(process_group_backend="pycomm")
    strategy=make_strategy(wire_dtype="fp16"),
    max_epochs=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Digits()
data = TensorDataset(images[:1400], labels[:1400])
trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))  # each rank gets a part of it
with torch.no_grad():
    accuracy = (model.net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if trainer.is_global_zero:
    print(f"test accuracy {accuracy:.1%}")
