"""The study aopc: do importances rank nodes well? The area over the perturbation curve (AOPC) of finished runs.

Nodes are pruned in several orders, and the accuracy is measured as more and more of them are gone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agscl.analysis.perturbation import PerturbationCurve, order_layer_by_layer, prune_in_order
from agscl.experiments.build import build_supervised, load_supervised
from agscl.experiments.certificate_chain import load_certificate
from agscl.experiments.jobs import Job
from agscl.experiments.run import check_data_unchanged
from agscl.experiments.run_config import RunConfig
from agscl.experiments.run_environment import use_threads
from agscl.experiments.studies import mean_curve, store_study
from agscl.methods.agscl import AGSCL
from agscl.runs import Run, RunError, read_result
from agscl.runs.json_files import read_checked_json, read_json
from agscl.system.tf32 import tf32_for
from agscl.training import Trainer
from agscl.training.seeds import derive_seed

ORDERS = ("highest", "lowest", "highest of each layer", "lowest of each layer", "random")
"""The orders in which nodes are pruned: by importance, over all layers or the same share of each, and at random."""
RANDOM_ORDERS = 5
"""How many random orders are averaged."""


def measure_perturbations(
    folder: Path, preset: str, jobs: Sequence[Job], on_message: Callable[[str], None]
) -> dict[str, Any]:
    """What the study aopc measures of finished runs: how accuracy falls as nodes are pruned, seed by seed.

    Each seed is stored as soon as it is measured. A seed is not measured again as long as its run's weights stay the
    same.
    """
    measured = _load_measured(folder / "aopc.json")
    for job in jobs:
        seed, weights = str(job.config.seed), read_result(job.folder)["methods"][job.config.method]["weights_sha256"]
        if measured.get(seed, {}).get("weights_sha256") != weights:
            measured[seed] = {"weights_sha256": weights, "after": _measure_run(job, on_message)}
            store_study(folder, preset, "aopc", {"seeds": measured}, {})
    return measured


def _load_measured(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    seeds = read_json(path, ". Remove it").get("seeds")
    if not isinstance(seeds, dict) or not all(
        isinstance(of_seed, dict) and isinstance(of_seed.get("after"), dict) for of_seed in seeds.values()
    ):
        raise RunError(f"{path} is damaged, or was written by another version of agscl. Remove it")
    return {seed: of_seed for seed, of_seed in seeds.items() if _has_all_orders(of_seed["after"])}


def _has_all_orders(after: Mapping[str, Any]) -> bool:
    """Whether every order was measured; an earlier version had fewer."""
    orders = [set(curves.get("aopc", ())) if isinstance(curves, dict) else set() for curves in after.values()]
    return bool(orders) and all(each == set(ORDERS) for each in orders)


def _measure_run(job: Job, on_message: Callable[[str], None]) -> dict[str, Any]:
    """The curves of a finished run after its first task and after its last."""
    config = job.config
    check_data_unchanged(job.folder, config)
    run = Run(job.folder)
    state = run.load_checkpoint()
    if state is None or config.method not in state["finished"]:
        raise RunError(f"the last checkpoint of {job.folder} is missing or damaged: remove the folder to run it again")
    run.check_checkpoint_config(state, config.as_dict())
    sequence = load_supervised(config)
    on_message(f"Training the first task of seed {config.seed} once more, to measure the network after it.")
    threads = read_checked_json(job.folder / "environment.json").get("threads", torch.get_num_threads())
    with tf32_for(config.training.precision), use_threads(threads):  # both decide the last bits
        first = build_supervised(config, config.method, sequence[:1])
        while first.advance():
            pass
        if not load_certificate(job.folder / "certificates" / "01.json").check(first.model.state_dict()).ok:
            on_message("Its weights differ in bits from the run's, as they may on a GPU or with another torch.")
        last = build_supervised(config, config.method, sequence)
        last.load_state_dict(state["trainer"])
        return {str(trainer.task_index): _measure_curves(trainer, config) for trainer in (first, last)}


def _measure_curves(trainer: Trainer, config: RunConfig) -> dict[str, Any]:
    method = trainer.method
    assert isinstance(method, AGSCL)
    generator = torch.Generator().manual_seed(derive_seed(config.seed, trainer.task_index))
    ascending, by_layer = (
        method.knowledge.omega.cpu().argsort(stable=True),
        order_layer_by_layer(method.graph, method.knowledge.omega),
    )

    def measure_curve(order: torch.Tensor) -> PerturbationCurve:
        return prune_in_order(method.graph, order, lambda: statistics.mean(trainer.test_accuracies()))

    random = [torch.randperm(len(ascending), generator=generator) for _ in range(RANDOM_ORDERS)]
    orders = [[ascending.flip(0)], [ascending], [by_layer.flip(0)], [by_layer], random]
    curves = {name: [measure_curve(order) for order in group] for name, group in zip(ORDERS, orders, strict=True)}
    return {
        "importances": _mean_importances(method),
        "pruned": curves["random"][0].pruned,
        "scores": {name: mean_curve([curve.scores for curve in group]) for name, group in curves.items()},
        "aopc": {name: mean_curve([curve.aopc for curve in group]) for name, group in curves.items()},
    }


def _mean_importances(method: AGSCL) -> dict[str, float]:
    """The mean importance of each layer's nodes."""
    layers = zip(method.graph.layers, method.graph.groups_by_layer(), strict=True)
    return {
        name: float(method.knowledge.omega.cpu()[in_layer].mean()) for name, in_layer in layers if bool(in_layer.any())
    }
