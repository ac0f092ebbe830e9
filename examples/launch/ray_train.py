"""Train with Ray Train: its TorchConfig takes the backend's name.

pip install "ray[train]" scikit-learn
python examples/launch/ray_train.py
"""

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train() -> None:
    """Run on each worker; Ray has made the group."""
    from sklearn.datasets import load_digits
    from torch import nn

    import pycomm

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    mine = slice(dist.get_rank(), 1400, dist.get_world_size())  # this worker's training images
    torch.manual_seed(dist.get_rank())  # the wrapper sends rank 0's parameters to all
    model = pycomm.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), wire_dtype="fp16"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    if dist.get_rank() == 0:
        print(f"backend {dist.get_backend()}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="pycomm"),
    )
    trainer.fit()  # a worker that fails makes this raise
