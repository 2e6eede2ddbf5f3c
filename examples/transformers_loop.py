"""AGS-CL with the Trainer of Transformers: one callback. Fine-tuning beside it, on five tasks of digits.

python examples/transformers_loop.py    # needs .[cli,transformers]
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from agscl import AGSCL, FineTune, MultiHead
from agscl.integrations.transformers import TransformersCallback
from agscl.tasks import load

tasks = load("digits", seed=0)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        trunk = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.model = MultiHead(trunk, features=100)

    def forward(self, x, labels):
        logits = self.model(x, self.task)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def learn(make_method, folder):
    torch.manual_seed(0)
    module = Digits()
    method = make_method(module.model)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=20,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    for task in tasks:
        module.task = task.name
        module.model.add_head(task.name, task.classes)
        examples = [{"x": x, "labels": y} for x, y in zip(task.train_x, task.train_y, strict=True)]
        callback = TransformersCallback(method, task.name)  # all there is to add
        Trainer(module, arguments, train_dataset=examples, callbacks=[callback]).train()
    with torch.no_grad():
        right = [(module.model(task.test_x, task.name).argmax(1) == task.test_y).float().mean() for task in tasks]
    return sum(right).item() / len(right), method


with tempfile.TemporaryDirectory() as folder:
    results = learn(FineTune, folder), learn(lambda model: AGSCL(model, tasks[0].train_x[:2]), folder)
print(f"fine-tuning  {results[0][0]:6.1%}")
print(f"AGS-CL       {results[1][0]:6.1%}")
print(results[1][1].certificate())
