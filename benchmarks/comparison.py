"""Every method and both bounds on a preset, over several seeds, at the preset's settings.

python benchmarks/comparison.py [digits] [--seeds 3] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from measured import record

from agscl.cli import main as cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    numbers = ["--seeds", str(arguments.seeds), "--jobs", str(arguments.jobs)]
    if code := cli.main(["compare", arguments.preset, *numbers]):
        sys.exit(code)
    compared = json.loads(Path(f"runs/compare-{arguments.preset}/comparison.json").read_text())
    record(Path(f"results/{arguments.preset}_comparison.json"), {"seeds": arguments.seeds, **compared})


if __name__ == "__main__":
    main()
