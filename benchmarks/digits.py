"""Fine-tuning against AGS-CL on the embedded digits, over several seeds, at the default settings.

python benchmarks/digits.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measured import record

from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run

KEPT = ("accuracies", "average_accuracy", "plasticity", "stability", "forgetting", "statistics", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/digits.json"))
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        config = configure("digits", method="agscl", seed=seed)
        with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run") as run:
            result = execute_run(config, run, checkpoint_every=1e9, threads=1)
        methods = {name: {key: outcome[key] for key in KEPT} for name, outcome in result["methods"].items()}
        runs.append({"seed": seed, "tasks": result["tasks"], "methods": methods, "seconds": result["seconds"]})
        print(seed, {name: round(100 * outcome["average_accuracy"], 1) for name, outcome in methods.items()})
    record(arguments.out, {"preset": "digits", "config": config.as_dict(), "runs": runs})


if __name__ == "__main__":
    main()
