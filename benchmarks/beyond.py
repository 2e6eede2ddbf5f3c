"""Can AGS-CL do better with the same network and no stored data? Variants of it, several seeds each.

AGSCL_DATA=FOLDER python benchmarks/beyond.py --device cuda --fast     # results/beyond.json
AGSCL_DATA=FOLDER python benchmarks/beyond.py --preset omniglot5 --lam 1000 --variants FORMS --out results/forms.json

Each variant differs from the paper's form, at the strength that was found for it, in what its name says. A second
strength is tried for each, since a variant may need another. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measured import record
from supervised import commits_of, parsed, run

from agscl.analysis import metrics
from agscl.experiments.compare import METRICS, summarize_values
from agscl.experiments.jobs import Job
from agscl.experiments.run_config import configure
from agscl.runs.errors import Interrupted
from agscl.runs.json_files import read_json

BASE = "the paper's form"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "proximal step every step": {"prox_every": "step"},
    "η 0.5": {"eta": 0.5},
    "η 1: importances add up": {"eta": 1.0},
    "η 1.2: importances grow": {"eta": 1.2},
    "μ by layer": {"by_layer": "mu"},
    "λ by layer": {"by_layer": "lam"},
    "μ and λ by layer": {"by_layer": "both"},
    "fresh weights where needed": {"rand_init": "needed"},
    "no fresh weights": {"rand_init": False},
    "nodes below 0.1 of their layer stay free": {"min_activity": 0.1},
    "nodes below 0.3 of their layer stay free": {"min_activity": 0.3},
    "fresh weights for all free nodes": {"rho": 1.0},
    "outgoing weights stay 0 for good": {"zero_init": "paper"},
    "importances in eval mode": {"importance_mode": "eval"},
    "both, as AGSCL has it by default": {"zero_init": "paper", "importance_mode": "eval"},
}
FORMS = (BASE, *list(VARIANTS)[-3:])
"""Where the code behind the paper's figures and the library's default part."""


def plan(arguments: argparse.Namespace, changes: dict[str, Any]) -> list[tuple[str, float, Job]]:
    """(variant, λ, run) of all."""
    asked = arguments.variants or list(VARIANTS)
    chosen = list(FORMS) if asked == ["FORMS"] else asked
    return [
        (
            name,
            lam,
            Job(
                configure(
                    arguments.preset,
                    method="paper-agscl",
                    seed=seed,
                    device=arguments.device,
                    reference=False,
                    **changes,
                    **{"lam": lam, **VARIANTS[name]},
                ),
                arguments.runs
                / ("beyond" if arguments.preset == "tinyimagenet32" else f"beyond-{arguments.preset}")
                / f"{list(VARIANTS).index(name)}-lam{lam:g}-seed{seed}",
            ),
        )
        for lam in arguments.lam
        for seed in range(arguments.seeds)
        for name in chosen
    ]


def collected(planned: list[tuple[str, float, Job]]) -> list[dict[str, Any]]:
    """A row for each variant and strength, and by how much it beats the paper's form at its best strength."""
    outcomes = {
        (name, lam, job.config.seed): read_json(job.folder / "result.json")["methods"]["paper-agscl"]
        for name, lam, job in planned
        if job.is_finished
    }
    base = max(
        dict.fromkeys(lam for name, lam, _ in outcomes if name == BASE),
        key=lambda lam: statistics.mean(
            valid(one) for (name, strength, _), one in outcomes.items() if (name, strength) == (BASE, lam)
        ),
        default=0.0,
    )
    rows = []
    for name, lam in dict.fromkeys((name, lam) for name, lam, _ in planned):
        mine = {seed: one for (variant, strength, seed), one in outcomes.items() if (variant, strength) == (name, lam)}
        if not mine:
            continue
        gains = [
            one["average_accuracy"] - outcomes[BASE, base, seed]["average_accuracy"]
            for seed, one in mine.items()
            if (BASE, base, seed) in outcomes
        ]
        rows.append(
            {
                "variant": name,
                "settings": {"lam": lam, **VARIANTS[name]},
                "seeds": list(mine),
                "valid_accuracy": summarize_values([valid(one) for one in mine.values()]),
                "gain": summarize_values(gains),
                "free_at_the_end": summarize_values([one["statistics"][-1]["sparsity"] for one in mine.values()]),
                "learned": summarize_values(
                    [statistics.mean(row[-1] for row in one["accuracies"]) for one in mine.values()]
                ),
                **{
                    key: summarize_values([one[key] for one in mine.values()]) for key in METRICS if key != "plasticity"
                },
            }
        )
    return rows


def valid(outcome: dict[str, Any]) -> float:
    return metrics.average_accuracy(outcome["valid_accuracies"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tinyimagenet32")
    parser.add_argument("--variants", nargs="+", choices=["FORMS", *VARIANTS], default=None)
    parser.add_argument("--lam", nargs="+", type=float, default=[1000.0, 10_000.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/beyond.json"))
    arguments, changes = parsed(parser)
    planned = plan(arguments, changes)
    try:
        run(arguments, [job for _, _, job in planned], arguments.jobs)
    except Interrupted:
        print("stopped at the deadline; the same command continues", flush=True)
    rows = collected(planned)
    for row in rows:
        print(f"{row['variant']:34} {row['settings']} {row['average_accuracy']} gain {row['gain']}", flush=True)
    finished = all(job.is_finished for _, _, job in planned)
    commits = commits_of(job.folder for _, _, job in planned if job.is_finished)
    record(
        arguments.out,
        {"preset": arguments.preset, "changes": changes, "commits": commits, "rows": rows, "complete": finished},
    )


if __name__ == "__main__":
    main()
