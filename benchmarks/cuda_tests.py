"""Run the tests that need a GPU and record how they ended.

python benchmarks/cuda_tests.py
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from measured import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/cuda_tests.json"))
    arguments = parser.parse_args()
    words = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--show-capture=no"]
    words += [f"tests/fast/test_{name}.py" for name in ("cuda", "split_adam", "conv3x3", "fused_trunk")]
    words += ["tests/reinforcement/test_ppo_cuda.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    print(done.stdout[-10_000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    record(arguments.out, {"exit_code": done.returncode, "counts": counts, "failed": failed})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
