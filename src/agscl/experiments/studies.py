"""The paper's analyses of AGS-CL: each a few forms of it, and what they are compared with, on a preset."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agscl.analysis import metrics
from agscl.analysis.perturbation import PerturbationCurve, order_layer_by_layer, prune_in_order
from agscl.certificate import Certificate
from agscl.experiments.compare import MEASURES, Job, measures, spread
from agscl.experiments.execute import check_finished, load_tasks, make_trainer
from agscl.experiments.methods import METHODS, REFERENCE, listed
from agscl.experiments.presets import RunConfig, configure
from agscl.experiments.search import FACTORS
from agscl.methods.agscl import AGSCL
from agscl.runs import Run, RunError, read_finished_runs, read_result
from agscl.runs.folder import read_json
from agscl.system.files import encode_json, write_if_changed
from agscl.system.tf32 import tf32_for
from agscl.training import Trainer
from agscl.training.trainer import mixed_seed

FORMS: dict[str, dict[str, Any]] = {
    "AGS-CL": {},
    "without (I.1)": {"zero_init": "off"},
    "without (I.2)": {"rand_init": False},
    "without both": {"zero_init": "off", "rand_init": False},
}
"""AGS-CL, and without its two re-initialisations: zeros for what free nodes give, fresh weights for some of them."""
RHOS = (0.1, 0.2, 0.3, 0.4, 0.5)
ORDERS = ("highest", "lowest", "highest of each layer", "lowest of each layer", "random")
"""In which nodes are taken away: by importance, over all layers or the same share of each, and by lot."""
DRAWS = 5
"""Random orders, of which the mean is taken."""


@dataclass(frozen=True)
class Line:
    """One line of a study."""

    label: str
    method: str
    settings: Mapping[str, Any]
    name: str = ""
    """Of its runs: the same in every study that has them."""
    jobs: Sequence[Job] = ()
    """A run for each seed."""


def _reinit(strength: Callable[[str], float]) -> list[Line]:
    return [Line(label, "agscl", form) for label, form in FORMS.items()]


def _tradeoff(strength: Callable[[str], float]) -> list[Line]:
    lines = [(label, "agscl", form) for label, form in FORMS.items()]
    lines += [(METHODS[name].title, name, {}) for name in ("mas", "ewc")]
    return [
        Line(f"{label}, λ {value:g}", method, {**form, "lam": value})
        for label, method, form in lines
        for value in sorted(float(f"{factor * strength(method):.3g}") for factor in FACTORS)
    ]


def _rho(strength: Callable[[str], float]) -> list[Line]:
    return [*[Line(f"AGS-CL, ρ {rho:g}", "agscl", {"rho": rho}) for rho in RHOS], Line("MAS", "mas", {})]


def _prox(strength: Callable[[str], float]) -> list[Line]:
    return [Line("AGS-CL", "agscl", {}), Line("without proximal steps", "agscl", {"prox": False})]


def _aopc(strength: Callable[[str], float]) -> list[Line]:
    return [Line("AGS-CL", "agscl", {})]


STUDIES: dict[str, Callable[[Callable[[str], float]], list[Line]]] = {
    "reinit": _reinit,
    "tradeoff": _tradeoff,
    "rho": _rho,
    "prox": _prox,
    "aopc": _aopc,
}


def methods_of(study: str) -> list[str]:
    """Whose runs a study needs. Fine-tuning is one, since plasticity is measured against it."""
    if study not in STUDIES:
        raise ValueError(f"there is no study {study!r}. There are: {', '.join(STUDIES)}")
    reference = [] if study == "aopc" else [REFERENCE]
    return [*reference, *dict.fromkeys(line.method for line in STUDIES[study](lambda method: 1.0))]


def plan(
    preset: str,
    study: str,
    seeds: int,
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> list[Line]:
    """The lines of a study with their runs. `settings` are those of single methods, `changes` those of training."""
    own = {method: {**changes, **(settings or {}).get(method, {})} for method in methods_of(study)}

    def usual(method: str) -> dict[str, Any]:
        """All settings of a method as they are without a study."""
        given = configure(preset, method=method, **own[method]).settings
        return vars(listed(method).load().Config(**given)) if listed(method).settings else {}

    def with_runs(line: Line) -> Line:
        known = usual(line.method)
        other = {key: value for key, value in line.settings.items() if value != known[key]}
        name = "-".join([line.method, *[f"{key}={value}" for key, value in other.items()]])
        chosen = {**own[line.method], **other}
        configs = [configure(preset, method=line.method, seed=seed, reference=False, **chosen) for seed in range(seeds)]
        jobs = [Job(one, folder / f"{name}-seed{one.seed}", f"{line.label}, seed {one.seed}") for one in configs]
        return replace(line, name=name, jobs=jobs)

    def strength(method: str) -> float:
        lam = float(usual(method)["lam"])
        if study == "tradeoff" and not 0 < lam < math.inf:
            raise ValueError(
                f"the trade-off goes over strengths around {method}'s λ, which is {lam:g}: use one between"
            )
        return lam

    lines = STUDIES[study](strength)
    if REFERENCE in own:
        lines = [Line(METHODS[REFERENCE].title, REFERENCE, {}), *lines]
    return [with_runs(line) for line in lines]


def with_others(lines: Sequence[Line], folder: Path) -> list[Line]:
    """The same lines with all seeds that are finished in the folder."""
    found = []
    for line in lines:
        jobs = list(line.jobs)
        for place, result in read_finished_runs(folder, f"{line.name}-seed*"):
            if place not in {job.folder for job in jobs} and line.method in result["methods"]:
                with contextlib.suppress(RunError):  # of another version: it was not asked for
                    jobs.append(Job(RunConfig.from_dict(result["config"]), place))
        found.append(replace(line, jobs=sorted(jobs, key=lambda job: job.config.seed)))
    return found


def collect(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """What the finished runs came to, line by line; curves have a value for each task, the mean over seeds."""
    results = [{job.config.seed: read_result(job.folder) for job in line.jobs if job.finished} for line in lines]
    reference = next((of for line, of in zip(lines, results, strict=True) if line.method == REFERENCE), {})
    collected = []
    for line, of_line in zip(lines, results, strict=True):
        if not of_line:
            continue
        outcomes = {seed: result["methods"][line.method] for seed, result in of_line.items()}
        values = [measures(each, reference.get(seed, {}).get("methods")) for seed, each in outcomes.items()]
        curves = {"average_accuracy": _mean_curve([_averages(each["accuracies"]) for each in outcomes.values()])}
        for figure in ("sparsity", "used_capacity", "frozen"):
            found = [[task.get(figure) for task in each["statistics"]] for each in outcomes.values()]
            if all(value is not None for curve in found for value in curve):
                curves[figure] = _mean_curve(found)
        collected.append(
            {
                "label": line.label,
                "method": line.method,
                "settings": dict(line.settings),
                "seeds": list(outcomes),
                **{measure: spread([each[measure] for each in values]) for measure in MEASURES},
                "curves": curves,
            }
        )
    return collected


def _averages(accuracies: metrics.Matrix) -> list[float]:
    """The average accuracy after each task."""
    return [metrics.average_accuracy(accuracies[: end + 1]) for end in range(len(accuracies))]


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


# The area over the perturbation curve --------------------------------------------------------------------------------


def perturbations(folder: Path, preset: str, jobs: Sequence[Job], note: Callable[[str], None]) -> dict[str, Any]:
    """How accuracy falls as nodes are taken away, seed by seed.

    Each seed is stored as soon as it is measured; what was measured of the same weights is not measured again.
    """
    known = _known(folder / "aopc.json")
    for job in jobs:
        seed, weights = str(job.config.seed), read_result(job.folder)["methods"][job.config.method]["weights_sha256"]
        if known.get(seed, {}).get("weights_sha256") != weights:
            known[seed] = {"weights_sha256": weights, "after": _perturbed(job, note)}
            store(folder, preset, "aopc", {"seeds": known}, {})
    return known


def _known(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    seeds = read_json(path, ". Remove it").get("seeds")
    if not isinstance(seeds, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("after"), dict) for one in seeds.values()
    ):
        raise RunError(f"{path} is damaged, or of another version. Remove it")
    return {seed: one for seed, one in seeds.items() if _complete(one["after"])}


def _complete(after: Mapping[str, Any]) -> bool:
    """Whether all orders were measured: there were fewer once."""
    orders = [set(curves.get("aopc", ())) if isinstance(curves, dict) else set() for curves in after.values()]
    return bool(orders) and all(each == set(ORDERS) for each in orders)


def _perturbed(job: Job, note: Callable[[str], None]) -> dict[str, Any]:
    """After the first task of a finished run, and after all of them."""
    config = job.config
    check_finished(job.folder, config)
    state = Run(job.folder).load_checkpoint()
    if state is None or config.method not in state["finished"]:
        raise RunError(f"the last checkpoint of {job.folder} is gone or damaged: remove the folder, to run it again")
    sequence = load_tasks(config)
    note(f"Learning the first task of seed {config.seed} once more, to look at the network before the second.")
    with tf32_for(config.training.precision), _threads_of(job.folder):
        first = make_trainer(config, config.method, sequence[:1])
        while first.advance():
            pass
        if not Certificate.load(job.folder / "certificates" / "01.json").check(first.model.state_dict()).ok:
            note("It came out with other bits than in the run, as it may on a GPU or with another torch.")
        last = make_trainer(config, config.method, sequence)
        last.load_state_dict(state["trainer"])
        return {str(trainer.task_index): _curves(trainer, config) for trainer in (first, last)}


@contextlib.contextmanager
def _threads_of(folder: Path) -> Iterator[None]:
    """As many threads as a run had: they decide the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(read_json(folder / "environment.json").get("threads", before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _curves(trainer: Trainer, config: RunConfig) -> dict[str, Any]:
    method = trainer.method
    assert isinstance(method, AGSCL)
    generator = torch.Generator().manual_seed(mixed_seed(config.seed, trainer.task_index))
    ascending, in_layers = method.omega.cpu().argsort(stable=True), order_layer_by_layer(method.graph, method.omega)

    def curve(order: torch.Tensor) -> PerturbationCurve:
        return prune_in_order(method.graph, order, lambda: statistics.mean(trainer.test_accuracies()))

    drawn = [torch.randperm(len(ascending), generator=generator) for _ in range(DRAWS)]
    orders = [[ascending.flip(0)], [ascending], [in_layers.flip(0)], [in_layers], drawn]
    found = {name: [curve(order) for order in of_name] for name, of_name in zip(ORDERS, orders, strict=True)}
    return {
        "importances": _means(method),
        "pruned": found["random"][0].pruned,
        "scores": {name: _mean_curve([each.scores for each in curves]) for name, curves in found.items()},
        "aopc": {name: _mean_curve([each.aopc for each in curves]) for name, curves in found.items()},
    }


def _means(method: AGSCL) -> dict[str, float]:
    """The mean importance of each layer's nodes."""
    layers = zip(method.graph.layers, method.graph.in_first_layer(), strict=True)
    return {name: float(method.omega.cpu()[here].mean()) for name, here in layers if bool(here.any())}


def store(folder: Path, preset: str, study: str, content: Mapping[str, Any], missing: Mapping[str, str]) -> Path:
    path = folder / f"{study}.json"
    write_if_changed(path, encode_json({"preset": preset, "study": study, **content, "missing": dict(missing)}))
    return path
