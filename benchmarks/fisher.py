"""How near the cheaper forms of EWC's Fisher come to the exact one, on trained networks for digits.

    python benchmarks/fisher.py [--seeds 5]

`total` is the sum of a Fisher over that of the exact one, `away` the sum of the absolute differences over it: 0 is the
exact Fisher, and 1 is no better than zeros.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from measured import record
from timing import summary
from torch import Tensor

from agscl import EWC, MultiHead
from agscl.networks.mlp import MLP
from agscl.tasks import load

EPOCHS, BATCH, RATE, WIDTHS = 30, 32, 1e-2, (50, 50, 50)  # those of the digits preset
FORMS = ("estimated", "sampled", "empirical", "batched")


def trained(x: Tensor, y: Tensor, seed: int) -> MultiHead:
    torch.manual_seed(seed)
    model = MultiHead(MLP(x.shape[1], WIDTHS), features=WIDTHS[-1])
    model.add_head("task", int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows], "task"), y[rows]).backward()
            optimizer.step()
    return model


def fisher(model: MultiHead, form: str, x: Tensor, y: Tensor, seed: int) -> Tensor:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = EWC(model, fisher=form, seed=seed)
    method.begin_task("task", optimizer)
    optimizer.step()  # moves nothing: the method warns where no step was made
    method.end_task([(x, y)])
    return torch.cat([one.flatten() for one in method.importances.values()]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/fisher.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for classes in (2, 10):
        total: dict[str, list[float]] = {form: [] for form in FORMS}
        away: dict[str, list[float]] = {form: [] for form in FORMS}
        for seed in range(arguments.seeds):
            tasks = [(task.train_x, task.train_y) for task in load("digits", seed=seed)]
            if classes == 10:
                labels = [y + 2 * number for number, (_, y) in enumerate(tasks)]
                tasks = [(torch.cat([x for x, _ in tasks]), torch.cat(labels))]
            for x, y in tasks:
                model = trained(x, y, seed)
                exact = fisher(model, "exact", x, y, seed)
                for form in FORMS:
                    mine = fisher(model, form, x, y, seed)
                    total[form].append(float(mine.sum() / exact.sum()))
                    away[form].append(float((mine - exact).abs().sum() / exact.sum()))
        found[str(classes)] = {
            form: {
                "total": {**summary(total[form]), "range": [min(total[form]), max(total[form])]},
                "away": {**summary(away[form]), "range": [min(away[form]), max(away[form])]},
            }
            for form in FORMS
        }
        for form, one in found[str(classes)].items():
            print(f"{classes} classes, {form}: total {one['total']}, away {one['away']}")
    record(arguments.out, {"seeds": arguments.seeds, "classes": found})


if __name__ == "__main__":
    main()
