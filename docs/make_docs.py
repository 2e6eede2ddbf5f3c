"""Fill the tables of README and docs from the files in results/, and draw the picture.

python docs/make_docs.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/results.md"]
COLUMNS = (("average_accuracy", 100, 1), ("plasticity", 1, 3), ("stability", 1, 3), ("forgetting", 100, 1))
NAMES = {"finetune": "fine-tuning", "agscl": "AGS-CL"}


def load(name: str) -> dict[str, Any] | None:
    path = HOME / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean ± standard deviation."""
    wide = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * wide:.{digits}f}"


def source(result: dict[str, Any]) -> str:
    machine = result["machine"]
    place = machine["gpu"] or f"{machine['processor']}, {machine['threads']} thread(s)"
    return f"`{result['command']}` at {result['commit'][:10]}, {place}, torch {machine['torch']}"


def digits() -> str:
    result = load("digits")
    if result is None:
        return ""
    runs = result["runs"]
    lines = [
        f"| {len(runs)} seeds | average accuracy, % | plasticity | stability | forgetting, % |",
        "|---|---|---|---|---|",
    ]
    for name in runs[0]["methods"]:
        of = [run["methods"][name] for run in runs]
        lines.append(
            f"| {NAMES[name]} | {spread([r['average_accuracy'] for r in of], 100)} "
            f"| {spread([r['plasticity'] for r in of], digits=3)} | {spread([r['stability'] for r in of], digits=3)} "
            f"| {spread([r['forgetting'] for r in of], 100)} |"
        )
    return "\n".join([*lines, "", source(result)])


def overhead() -> str:
    result = load("benchmarks/overhead")
    if result is None:
        return ""
    lines = ["| proximal step | time of a training step, plain = 1 |", "|---|---|"]
    lines += [f"| once an {name} | {ratio:.3f} |" for name, ratio in result["ratio"].items() if name == "epoch"]
    lines += [f"| every {name} | {ratio:.3f} |" for name, ratio in result["ratio"].items() if name == "step"]
    return "\n".join([*lines, "", f"The paper's CIFAR network, batch {result['batch']}: {source(result)}"])


def omniglot5() -> str:
    result = load("omniglot5")
    if result is None:
        return ""
    lines = [
        "| seed | method | average accuracy, % | forgetting, % | important nodes frozen, by task |",
        "|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        for name, outcome in run["methods"].items():
            frozen = [f"{s['frozen']}/{s['important_before']}" for s in outcome["statistics"] if s]
            lines.append(
                f"| {run['seed']} | {NAMES[name]} | {100 * outcome['average_accuracy']:.1f} "
                f"| {100 * outcome['forgetting']:.2f} | {', '.join(frozen)} |"
            )
    return "\n".join([*lines, "", source(result)])


def omniglot50() -> str:
    result = load("omniglot50")
    if result is None:
        return ""
    lines = [
        "| seed | method | average accuracy, % | forgetting, % | all important nodes frozen from |",
        "|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        for name, outcome in run["methods"].items():
            moving = [i for i, s in enumerate(outcome["statistics"]) if s and s["frozen"] < s["important_before"]]
            since = f"task {moving[-1] + 2} of {len(run['tasks'])}" if moving else "–"
            lines.append(
                f"| {run['seed']} | {NAMES[name]} | {100 * outcome['average_accuracy']:.1f} "
                f"| {100 * outcome['forgetting']:.2f} | {since} |"
            )
    return "\n".join([*lines, "", source(result)])


def comparison() -> str:
    result = load("digits_comparison")
    if result is None:
        return ""
    lines = [
        "| method | average accuracy, % | plasticity | stability | forgetting, % |",
        "|---|---|---|---|---|",
    ]
    for name, of in result["methods"].items():
        parts = [
            f"{scale * of[key]['mean']:.{digits}f} ± {scale * of[key]['deviation']:.{digits}f}"
            for key, scale, digits in COLUMNS
        ]
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return "\n".join([*lines, "", f"Seeds 0 to {result['seeds'] - 1}. {source(result)}"])


def contract() -> str:
    result = load("contract")
    if result is None:
        return ""
    cells = {(row["method"], row["network"], row["optimizer"]): row for row in result["cells"]}
    columns = list(dict.fromkeys((network, optimizer) for _, network, optimizer in cells))
    held = sum(row["checks"] == "passed" and not row["complaint"] for row in cells.values())
    lines = [
        "| share saved | " + " | ".join(f"{network} {optimizer}" for network, optimizer in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in dict.fromkeys(method for method, _, _ in cells):
        marks = []
        for place in columns:
            row = cells[name, *place]
            mark = "diverged" if row["saved"] is None else f"{row['saved']:.2f}"
            marks.append(mark if row["checks"] == "passed" and not row["complaint"] else f"*{mark}*")
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return "\n".join([*lines, "", f"{held} of {len(cells)} cells hold; the others are in italics. {source(result)}"])


SECTIONS: dict[str, Callable[[], str]] = {
    "digits": digits,
    "overhead": overhead,
    "omniglot5": omniglot5,
    "omniglot50": omniglot50,
    "comparison": comparison,
    "contract": contract,
}


def filled(text: str) -> str:
    """The page with each section between its markers made anew."""
    for name, make in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name}: made by make docs -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
    return text


def draw() -> None:
    """Accuracy on every task after every task, fine-tuning and AGS-CL side by side."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "agscl"
    import matplotlib.pyplot as plt

    result = load("digits")
    if result is None:
        return
    run = result["runs"][0]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for axis, (name, outcome) in zip(axes, run["methods"].items(), strict=True):
        rows = outcome["accuracies"]
        size = len(rows)
        table = [[rows[i][j] if j <= i else float("nan") for j in range(size)] for i in range(size)]
        shown = axis.imshow(table, vmin=0, vmax=1, cmap="RdYlGn")
        for i in range(size):
            for j in range(i + 1):
                color = "white" if rows[i][j] > 0.85 else "black"
                axis.text(j, i, f"{100 * rows[i][j]:.0f}", ha="center", va="center", fontsize=9, color=color)
        axis.set_title(f"{NAMES[name]}: {100 * outcome['average_accuracy']:.1f} % at the end")
        axis.set_xticks(range(size), run["tasks"])
        axis.set_yticks(range(size), run["tasks"])
        axis.set_xlabel("accuracy on task")
        axis.set_ylabel("after learning")
        for side in axis.spines.values():
            side.set_visible(False)
    figure.colorbar(shown, ax=axes, format=lambda value, _: f"{100 * value:.0f} %", shrink=0.8)
    figure.savefig(HOME / "docs" / "forgetting.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for name in PAGES:
        page = HOME / name
        text = page.read_text()
        if filled(text) != text:
            stale.append(name)
            if not arguments.check:
                page.write_text(filled(text))
    if arguments.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make docs")
    if not arguments.check:
        draw()


if __name__ == "__main__":
    main()
