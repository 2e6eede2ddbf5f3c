"""AGS-CL with Lightning: one callback. Fine-tuning beside it, on five tasks of digits.

python examples/lightning_loop.py    # needs .[cli,lightning]
"""

import logging
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agscl import AGSCL, FineTune, MultiHead
from agscl.integrations.lightning import LightningCallback
from agscl.tasks import load

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
tasks = load("digits", seed=0)


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = MultiHead(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x, self.task), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def learn(make_method):
    torch.manual_seed(0)
    module = Digits()
    method = make_method(module.model)
    for task in tasks:
        module.task = task.name
        module.model.add_head(task.name, task.classes)
        loader = DataLoader(TensorDataset(task.train_x, task.train_y), batch_size=32, shuffle=True)
        trainer = pl.Trainer(
            max_epochs=20,
            callbacks=[LightningCallback(method, task.name)],  # all there is to add
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    with torch.no_grad():
        right = [(module.model(task.test_x, task.name).argmax(1) == task.test_y).float().mean() for task in tasks]
    return sum(right).item() / len(right), method


print(f"fine-tuning  {learn(FineTune)[0]:6.1%}")
accuracy, method = learn(lambda model: AGSCL(model, tasks[0].train_x[:2]))
print(f"AGS-CL       {accuracy:6.1%}")
print(method.certificate())
