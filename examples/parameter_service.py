"""Train through a parameter server: two workers push gradients and pull parameters.

Three terminals, the first one for the server:

    python -m pycomm serve examples/parameter_service.py:make --listen 127.0.0.1:6170 --workers 2
    python examples/parameter_service.py 127.0.0.1:6170 0
    python examples/parameter_service.py 127.0.0.1:6170 1
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import pycomm


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The server calls it for the model and its optimizer; a worker only uses the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train(servers: str, worker: int) -> None:
    """Train on every second image, and report the accuracy on images that nobody trains on."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    mine = torch.arange(worker, 1400, 2)
    model, _ = make()
    draw = torch.Generator().manual_seed(worker)
    # An exception inside `with` counts as a crash: the server waits for this worker to come back.
    with pycomm.ParameterClient(model, servers=servers, worker=worker, staleness=0) as client:
        for _ in range(200):
            batch = mine[torch.randint(len(mine), (64,), generator=draw)]
            model.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            client.push()  # the server steps once it has the gradients of both workers
            client.pull()
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    print(f"worker {worker}: {client.clock} steps, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
