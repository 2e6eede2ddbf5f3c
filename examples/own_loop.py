"""AGS-CL in a training loop of your own: three lines more than plain PyTorch.

python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agscl import AGSCL, MultiHead
from agscl.tasks import load

torch.manual_seed(0)
tasks = load("digits", seed=0)
batches = {
    task.name: DataLoader(TensorDataset(task.train_x, task.train_y), batch_size=32, shuffle=True) for task in tasks
}
epochs = 20

trunk = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
model = MultiHead(trunk)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
method = AGSCL(model, tasks[0].train_x[:2])

for task in tasks:
    model.add_head(task.name, task.classes)
    method.begin_task(task.name, optimizer, epochs=epochs)
    for _epoch in range(epochs):
        for x, y in batches[task.name]:
            loss = F.cross_entropy(model(x, task.name), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        method.end_epoch()
    method.end_task(batches[task.name])

    learned = tasks[: tasks.index(task) + 1]
    with torch.no_grad():
        right = [(model(old.test_x, old.name).argmax(1) == old.test_y).float().mean().item() for old in learned]
    print(" ".join(f"{accuracy:6.1%}" for accuracy in right))

print(method.capacity())
print(method.certificate())
