"""What each piece of the fast path is worth: whole runs of tinyimagenet32 with AGS-CL, with all pieces and without one.

python benchmarks/fast_pieces.py --device cuda                      # results/benchmarks/fast_pieces_<device>.json
python benchmarks/fast_pieces.py --device cuda --only "all pieces" "no CUDA graphs" --repeats 5
python benchmarks/fast_pieces.py --device cpu --tiny                # the same in seconds, to see that it works

Every run is a process of its own. The first of each variant starts with nothing compiled, in empty cache folders: whole
with all pieces, of few epochs with the others. Then all take turns. Results are written after every round, until the
deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from measured import record
from timing import summary

from agscl.experiments.run import execute_run
from agscl.experiments.run_config import configure
from agscl.runs import Run
from agscl.system.process import skip_gc_at_exit, tune_malloc

PRESET, METHOD, SETTINGS = "tinyimagenet32", "paper-agscl", {"lam": 10_000.0}
TRAINING: dict[str, Any] = {"engine": "captured", "precision": "bf16", "channels_last": True, "compile": True}
"""All that `--fast` switches on."""
FIRST_EPOCHS = 2
"""Per task in the first run of a variant without a piece, which is to compile all there is to compile."""
TINY: dict[str, Any] = {"compile": False}
"""With `--tiny`: no compiler, which a CPU would need minutes for; and digits for an epoch."""


@dataclass(frozen=True)
class Variant:
    """The fast path, with something switched off."""

    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `TrainingConfig` that differ."""
    pieces: dict[str, bool] = field(default_factory=dict)
    """Fields of `agscl.fast.fast_engine.Pieces` that differ."""


ALL = "all pieces"
VARIANTS = {
    ALL: Variant(),
    "torch's fused Adam": Variant(pieces={"split_adam": False}),
    "cuDNN's convolutions": Variant(pieces={"own_convolutions": False}),
    "torch's compiler, our convolutions": Variant(pieces={"fused_layers": False}),
    "torch's compiler, cuDNN's convolutions": Variant(pieces={"fused_layers": False, "own_convolutions": False}),
    "nothing compiled": Variant(training={"compile": False}),
    "no CUDA graphs": Variant(pieces={"cuda_graphs": False}),
    "plain engine": Variant(training={"engine": "plain"}),
    "TF32 in place of bf16": Variant(training={"precision": "tf32"}),
    "no channels last": Variant(training={"channels_last": False}),
    "nothing fast": Variant(
        training={"engine": "plain", "precision": "float32", "channels_last": False, "compile": False}
    ),
}


def run_once(name: str, device: str, epochs: int, tiny: bool = False) -> dict[str, Any]:
    """One whole run in this process: all tasks, checkpoints and certificates included."""
    from agscl.fast import fast_engine

    start = time.perf_counter()
    variant = VARIANTS[name]
    fast_engine.PIECES = fast_engine.Pieces(**variant.pieces)
    training = {**TRAINING, **variant.training, "epochs": epochs, **(TINY if tiny else {})}
    preset = "digits" if tiny else PRESET
    config = configure(preset, method=METHOD, seed=0, device=device, reference=False, **SETTINGS, **training)
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run") as run:
        result = execute_run(config, run, checkpoint_every=60.0, threads=1)
    outcome = result["methods"][METHOD]
    return {
        "seconds": time.perf_counter() - start,
        "training_seconds": result["seconds"][METHOD],
        "average_accuracy": outcome["average_accuracy"],
        "forgetting": outcome["forgetting"],
    }


def run_process(name: str, device: str, epochs: int, tiny: bool, cache: Path) -> dict[str, Any]:
    """The same in a process of its own, from its start to its end; compilers keep what they made in `cache`."""
    words = [sys.executable, __file__, "--one", name, "--device", device, "--epochs", str(epochs)]
    words += ["--tiny"] if tiny else []
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    start = time.perf_counter()
    done = subprocess.run(words, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return {"process_seconds": time.perf_counter() - start, **json.loads(done.stdout.splitlines()[-1])}


def compare(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds of each variant, and how many times as long it takes as all pieces did in the same round."""
    reference = [run.get("process_seconds") for run in runs[ALL]]
    rows = {}
    for name, repeats in runs.items():
        pairs = [(run.get("process_seconds"), base) for run, base in zip(repeats, reference, strict=True)]
        ratios = [seconds / base for seconds, base in pairs if seconds and base]
        failed = [run["failed"] for run in repeats if "failed" in run]
        rows[name] = {
            "variant": asdict(VARIANTS[name]),
            "runs": repeats,
            **({"process_seconds": summary([seconds for seconds, _ in pairs if seconds])} if ratios else {}),
            **({"times_as_long": summary(ratios)} if ratios else {}),
            **({"failed": failed} if failed else {}),
        }
    return rows


def measure(
    names: list[str], device: str, epochs: int, repeats: int, tiny: bool, out: Path, deadline: float = 1e6
) -> None:
    begun = time.perf_counter()
    common = {"preset": "digits" if tiny else PRESET, "method": METHOD, "settings": SETTINGS, "epochs": epochs}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder) / str(number) for number, name in enumerate(names)}
        first: dict[str, Any] = {}
        for name in names:
            length = epochs if name == ALL else min(epochs, FIRST_EPOCHS)
            first[name] = run_process(name, device, length, tiny, caches[name])
            print(f"{name}, nothing compiled before: {describe(first[name])}", flush=True)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(repeats):
            if number and time.perf_counter() - begun > deadline:
                break
            for name in random.Random(number).sample(names, len(names)):
                runs[name].append(run_process(name, device, epochs, tiny, caches[name]))
                print(f"{name}: {describe(runs[name][-1])}", flush=True)
            record(out, {**common, "first_start": first, "variants": compare(runs)})


def describe(run: dict[str, Any]) -> str:
    return f"failed: {run['failed']}" if "failed" in run else f"{run['process_seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=100, help="per task")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant, after the first")
    parser.add_argument("--deadline", type=float, default=1e6, help="seconds after which no further round begins")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="which variants")
    parser.add_argument("--tiny", action="store_true", help="digits for an epoch, nothing compiled")
    parser.add_argument("--one", choices=list(VARIANTS), help="instead: one run of a variant, as JSON")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.one:
        skip_gc_at_exit()  # as `agscl` does
        tune_malloc()
        print(json.dumps(run_once(arguments.one, arguments.device, arguments.epochs, arguments.tiny)))
        return
    names = [ALL, *(name for name in arguments.only if name != ALL)]
    out = arguments.out or Path(f"results/benchmarks/fast_pieces_{arguments.device}.json")
    epochs = 1 if arguments.tiny else arguments.epochs
    measure(names, arguments.device, epochs, arguments.repeats, arguments.tiny, out, arguments.deadline)


if __name__ == "__main__":
    main()
