"""Two tasks with Lightning on two processes; the second head comes after the model was wrapped.

python tests/integrations/lightning_ddp.py FOLDER
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from agscl import AGSCL, MultiHead
from agscl.integrations.lightning import LightningCallback
from loops import blobs, mlp

torch.set_num_threads(1)
torch.manual_seed(0)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = MultiHead(mlp())
        self.task = ""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x, self.task), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class AddHead(pl.Callback):
    """Adds a head when the model has been wrapped already; other weights on each rank at first."""

    def on_fit_start(self, trainer, pl_module):
        torch.manual_seed(trainer.global_rank + 7)
        self.wrapped = isinstance(trainer.strategy.model, torch.nn.parallel.DistributedDataParallel)
        pl_module.model.add_head("second", 3)


def fit(net, *callbacks, data):
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    trainer = pl.Trainer(
        max_epochs=20,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=6))
    return trainer


net = Net()
method = AGSCL(net.model, torch.zeros(2, 16))
probe = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))

net.task = "first"
net.model.add_head("first", 3)
fit(net, LightningCallback(method, "first"), data=blobs(0))
before = net.model(probe, "first").detach()

net.task = "second"
adding = AddHead()
trainer = fit(net, adding, LightningCallback(method, "second"), data=blobs(1))
x, y = (torch.cat(part) for part in zip(*blobs(1), strict=True))
torch.save(
    {
        "world_size": trainer.world_size,
        "added_after_wrapping": adding.wrapped,
        "weights": net.model.state_dict(),
        "before": before,
        "after": net.model(probe, "first").detach(),
        "kind": method.certificate().kind,
        "loss": F.cross_entropy(net.model(x, "second"), y).item(),
    },
    Path(sys.argv[1]) / f"{trainer.global_rank}.pt",
)
os._exit(0)  # gloo's threads sometimes abort the process at exit
