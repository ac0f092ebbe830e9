"""Train with the Hugging Face Trainer: make_training_arguments() instead of TrainingArguments().

pip install transformers==5.23.0 accelerate==1.15.0 scikit-learn
torchrun --nproc-per-node=2 examples/with_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer

from pycomm.integrations.transformers import make_training_arguments

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


rows = [{"inputs": x, "labels": y} for x, y in zip(images[:1400], labels[:1400], strict=True)]
args = make_training_arguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=32,
    num_train_epochs=5,
    learning_rate=0.01,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(0)
model = Digits()
Trainer(model=model, args=args, train_dataset=rows).train()
with torch.no_grad():
    accuracy = (model.net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
if dist.get_rank() == 0:
    print(f"backend {dist.get_backend()}, test accuracy {accuracy:.1%}")
dist.destroy_process_group()
