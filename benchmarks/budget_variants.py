"""What other forms of the budget would be worth, on validation data of tinyimagenet32: how its defaults were chosen.

AGSCL_DATA=FOLDER python benchmarks/budget_variants.py --device cuda --jobs 15     # results/budget_variants.json
AGSCL_DATA=FOLDER python benchmarks/budget_variants.py --only default "always scaled" --seeds 4 --deadline 500
python benchmarks/budget_variants.py --preset digits --epochs 10 --device cpu --only default "score: size alone" --out F
python benchmarks/budget_variants.py --preset atari8-short --only default "old inputs from 0" --out FILE \\
    --changes '{"task_options": {"games": "star_gunner,boxing"}, "evaluations": 2, "evaluation_limit": 4500}'

Each variant changes the library within a process of its own. Seeds begin at 1000, which no table shows. Runs that are
in --out already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured import record
from torch import Tensor

from agscl.experiments.build import HOLD_OUT
from agscl.experiments.presets import get_fast_settings
from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.experiments.search import SEED
from agscl.graph.nodes import NodeGraph
from agscl.methods import agscl
from agscl.methods._agscl import node_pruner, pruning_schedule
from agscl.runs import Run

Change = Callable[[], None]


def keep_rate() -> None:
    """The loop's learning rate is not restarted when nodes have been pruned."""
    from agscl.fast.fast_engine import GraphEngine
    from agscl.training.plateau_schedule import PlateauSchedule

    for schedule in (PlateauSchedule, GraphEngine):
        schedule.restart_rate = lambda self: None  # type: ignore[method-assign]


def scale_with(steps_left: float) -> None:
    """Nodes that stay are scaled up where fewer steps than these are left."""
    node_pruner.RECOVERY_STEPS = steps_left


def prune_between(first: float, last: float) -> None:
    pruning_schedule.PRUNING_SPAN = (first, last)


def score_by_size() -> None:
    """Nodes are kept by their size alone."""
    node_pruner.NodePruner.observe_gradients = lambda self, *_: None  # type: ignore[method-assign]


def favour_early_layers(ratio: float) -> None:
    """Shares fall by this factor, twice, from the first layer to the last; their geometric mean is the budget."""
    make = node_pruner.NodePruner.__init__

    def init(self: Any, plan: Any, share: Any) -> None:
        make(self, plan, share)
        last = len(self.quotas) - 1
        shares = [min(1.0, share * ratio ** (2 * number / last - 1)) for number in range(last + 1)]
        self.quotas = [
            (groups, math.ceil(round(len(groups) * own, 9)))
            for (groups, _), own in zip(self.quotas, shares, strict=True)
        ]

    node_pruner.NodePruner.__init__ = init  # type: ignore[method-assign]


def start_without_old_inputs() -> None:
    """Fresh nodes read those of earlier tasks with weights that start at 0."""
    renew = agscl.reinitialise_

    @torch.no_grad()
    def reinitialise(graph: NodeGraph, chosen: Tensor, *others: Any) -> str:
        packed = renew(graph, chosen, *others)
        for name, layer in graph.layers.items():
            if name not in graph.readers:
                continue
            weight, sources = layer.module.weight, graph.readers[name].source_groups()
            old = ((sources >= 0) & ~chosen[sources.clamp(min=0)]).to(weight.device)
            fresh = chosen[layer.groups].view(-1, *[1] * (weight.dim() - 1)).to(weight.device)
            weight.masked_fill_(fresh & old, 0.0)
        return packed

    agscl.reinitialise_ = reinitialise


def favour_first_task(weight: float) -> None:
    """With a number of tasks as budget: the first takes this many times what the others take."""

    def count_kept(free: int, tasks: Any, learned: int) -> int:
        own = weight if learned == 0 else 1.0
        return math.ceil(round(free * own / (own + max(0, tasks - learned - 1)), 9))

    node_pruner.count_kept = count_kept


VARIANTS: dict[str, tuple[Change | None, dict[str, Any]]] = {
    "default": (None, {}),
    "default, CPR": (None, {"cpr": 0.4}),
    "no inputs from later nodes": (None, {"zero_init": "paper"}),
    "rate not restarted": (keep_rate, {}),
    "always scaled": (partial(scale_with, math.inf), {}),
    "score: size alone": (score_by_size, {}),
    "pruned at 20 to 60 %": (partial(prune_between, 0.2, 0.6), {}),
    "pruned at 40 to 80 %": (partial(prune_between, 0.4, 0.8), {}),
    **{f"share {share}": (None, {"budget": share}) for share in (0.15, 0.2, 0.3, 0.35)},
    "larger shares in early layers": (partial(favour_early_layers, 0.625), {}),
    "old inputs from 0": (start_without_old_inputs, {}),
    "ten tasks": (None, {"budget": 10}),
    "ten tasks, the first larger": (partial(favour_first_task, 2.5), {"budget": 10}),
    "rival: PackNet 0.9": (None, {"method": "packnet", "share": 0.9}),
    "rival: PackNet 0.95": (None, {"method": "packnet", "share": 0.95}),
    "rival: PackNet 0.9, CPR": (None, {"method": "packnet", "share": 0.9, "cpr": 0.4}),
    **{f"rival: WSN {c}": (None, {"method": "wsn", "c": c}) for c in (0.5, 0.7, 0.9)},
    **{f"rival: TRGP {threshold}": (None, {"method": "trgp", "threshold": threshold}) for threshold in (0.99, 0.995)},
    "rival: SPG": (None, {"method": "spg"}),
    "rival: HAT 926": (None, {"method": "hat", "c": 926}),
    "rival: fine-tuning": (None, {"method": "finetune"}),
}


def run_variant(name: str, seed: int, preset: str, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    change, settings = VARIANTS[name]
    if change is not None:
        change()
    options = {"method": "agscl", **get_fast_settings(device, preset), **changes, **settings}
    config = configure(preset, seed=seed, device=device, reference=False, hold_out=HOLD_OUT, **options)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run") as run:
        outcome = execute_run(config, run, checkpoint_every=1e9, threads=1)["methods"][config.method]
    accuracies = outcome["valid_accuracies"]
    return {
        "variant": name,
        "seed": seed,
        "valid_accuracy": statistics.mean(accuracies[-1]),
        "just_learned": statistics.mean(row[-1] for row in accuracies),
        "by_task": accuracies[-1],
        "seconds": time.perf_counter() - start,
    }


def attempt(work: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return run_variant(*work)
    except Exception as error:
        return {"variant": work[0], "seed": work[1], "failed": f"{type(error).__name__}: {error}"}


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per variant: its mean, and its lead over the default on the seeds that both have."""
    scores: dict[str, dict[int, float]] = {}
    for run in runs:
        if "failed" not in run:
            scores.setdefault(run["variant"], {})[run["seed"]] = run["valid_accuracy"]
    base = scores.get("default", {})
    rows = {}
    for name, by_seed in scores.items():
        leads = [by_seed[seed] - base[seed] for seed in by_seed.keys() & base.keys()]
        rows[name] = {
            "seeds": len(by_seed),
            "valid_accuracy": statistics.mean(by_seed.values()),
            **({"lead": statistics.mean(leads)} if leads and name != "default" else {}),
        }
    return dict(sorted(rows.items(), key=lambda row: -row[1]["valid_accuracy"]))


def load_runs(path: Path, preset: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    stored = json.loads(path.read_text())
    if (stored["preset"], stored["changes"]) != (preset, changes):
        raise SystemExit(f"{path} holds runs of {stored['preset']} with {stored['changes']}: name another --out")
    return [run for run in stored["runs"] if "failed" not in run]


def take_until(results: Iterable[dict[str, Any]], deadline: float) -> Iterable[dict[str, Any]]:
    """The results of a pool's iterator as they come, until the deadline."""
    start, waiting = time.perf_counter(), iter(results)
    while True:
        try:
            yield waiting.next(timeout=max(0.0, start + deadline - time.perf_counter()))  # type: ignore[attr-defined]
        except (StopIteration, multiprocessing.TimeoutError):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tinyimagenet32")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="which variants")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=None, help="per task (default: the preset's)")
    parser.add_argument("--changes", default="{}", help="other settings of all runs as JSON, e.g. of training")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1e6, help="seconds after which no more is waited for")
    parser.add_argument("--out", type=Path, default=Path("results/budget_variants.json"))
    arguments = parser.parse_args()
    changes = json.loads(arguments.changes) | ({} if arguments.epochs is None else {"epochs": arguments.epochs})
    runs = load_runs(arguments.out, arguments.preset, changes)
    done = {(run["variant"], run["seed"]) for run in runs}
    work = [
        (name, seed, arguments.preset, arguments.device, changes)
        for seed in range(SEED, SEED + arguments.seeds)
        for name in arguments.only
        if (name, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for run in take_until(pool.imap_unordered(attempt, work), arguments.deadline):
            runs.append(run)
            found = run.get("failed") or f"{100 * run['valid_accuracy']:.1f} %"
            print(f"{run['variant']:30} seed {run['seed']}: {found}", flush=True)
    rows = summarize(runs)
    record(arguments.out, {"preset": arguments.preset, "changes": changes, "variants": rows, "runs": runs})
    for name, row in rows.items():
        lead = f"{100 * row['lead']:+.1f}" if "lead" in row else ""
        print(f"{name:30} {row['seeds']} seeds  {100 * row['valid_accuracy']:.1f} %  {lead}")


if __name__ == "__main__":
    main()
