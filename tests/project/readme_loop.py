"""Run the training loop of the README on random data: needs agscl, torch and numpy, nothing else.

python tests/project/readme_loop.py [README.md]
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

README = Path(__file__).parents[2] / "README.md"


def read_loop(page: Path) -> str:
    """The first Python block of the page."""
    return page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def main() -> None:
    torch.manual_seed(0)
    # the names that the README leaves to its reader
    names = {
        "trunk": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()),
        "example_input": torch.randn(4, 8),
        "tasks": [SimpleNamespace(name=name, classes=2) for name in ("first", "second", "third")],
        "epochs": 2,
        "batches": [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(3)],
    }
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else README
    exec(compile(read_loop(page), str(page), "exec"), names)
    print(names["method"].certificate())


if __name__ == "__main__":
    main()
