"""What other libraries need to train over pycomm, where changing the backend's name is not enough.

- ``launch``: rank, world size and address from mpirun's and srun's variables.
- ``lightning``: a strategy with pycomm's wrapper.
- ``accelerate``: an Accelerator that is sure to wrap the model, on CPU, too.
- ``transformers``: the same for the Trainer, and its command line.
- ``torchrec``: a sharding plan for embedding tables on the CPU, and what TorchRec lacks there.

Importing this package loads none of these libraries.
"""

from __future__ import annotations
