"""Write the tables of README and docs from the files in results/, and draw the figures.

python docs/make_docs.py [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
HOME = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "docs/results.md",
    "docs/reproduce.md",
    "docs/which_method.md",
    "docs/cost.md",
    "docs/reinforcement.md",
]
COLUMNS = (("average_accuracy", 100, 1), ("plasticity", 1, 3), ("stability", 1, 3), ("forgetting", 100, 1))
NAMES = {"finetune": "fine-tuning", "agscl": "AGS-CL", "paper-agscl": "AGS-CL, the paper's form"}


def load(name: str) -> dict[str, Any] | None:
    path = HOME / "results" / f"{name}.json"
    return _name_papers_form(json.loads(path.read_text())) if path.exists() else None


def _name_papers_form(value: Any) -> Any:
    """Results from before AGS-CL had a budget call the paper's form agscl: give it today's name, in studies too."""
    if isinstance(value, list):
        return [_name_papers_form(one) for one in value]
    if not isinstance(value, dict):
        return value
    renamed = {
        "paper-agscl" if key == "agscl" and '"mu"' in json.dumps(one) else key: _name_papers_form(one)
        for key, one in value.items()
    }
    if renamed.get("method") == "agscl" and {"mu", "lam"} & set(renamed.get("settings", {})):
        renamed["method"] = "paper-agscl"
    if "curves" in renamed:  # a line of a study
        renamed["label"] = re.sub("^AGS-CL( paper)?(?=,|$)", NAMES["paper-agscl"], renamed["label"])
    return renamed


def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean ± standard deviation."""
    wide = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * wide:.{digits}f}"


def made_from(name: str) -> Callable[[Callable[[Result], str]], Callable[[], str]]:
    """Decorator: make a section from one result; the section is empty where that file does not exist."""

    def with_result(make: Callable[[Result], str]) -> Callable[[], str]:
        return lambda: "" if (result := load(name)) is None else make(result)

    return with_result


def source(result: dict[str, Any]) -> str:
    machine = result["machine"]
    place = machine["gpu"] or f"{machine['processor']}, {machine['threads']} thread(s)"
    commits = ", ".join(result.get("commits") or [re.sub("(?<=^.{10})[0-9a-f]+", "", result["commit"])])
    return f"`{result['command']}` at {commits}, {place}, torch {machine['torch']}"


README_METHODS = ("agscl", "paper-agscl", "packnet", "wsn", "hat", "trgp", "gpm", "ewc", "si", "mas", "finetune")


@made_from("digits_comparison")
def digits(result: Result) -> str:
    lines = [
        f"| {result['seeds']} seeds | settings | average accuracy, % | forgetting, % |",
        "|---|---|---|---|",
    ]
    for name in README_METHODS:
        row = result["methods"][name]
        settings = ", ".join(f"{SYMBOLS.get(key, key)} {value:g}" for key, value in row["settings"].items())
        accuracy, forgetting = (_spread_of(row[key], 100, 1) for key in ("average_accuracy", "forgetting"))
        lines.append(f"| {_title(name)} | {settings or 'none'} | {accuracy} | {forgetting} |")
    return "\n".join([*lines, "", source(result)])


@made_from("benchmarks/overhead")
def overhead(result: Result) -> str:
    lines = ["| form | time of a training step, plain = 1 |", "|---|---|"]
    forms = {
        "budget": "with a budget, the default",
        "epoch": "the paper's, a proximal step once an epoch",
        "step": "the paper's, a proximal step after every step",
    }
    lines += [f"| {text} | {result['ratio'][name]:.3f} |" for name, text in forms.items() if name in result["ratio"]]
    return "\n".join([*lines, "", f"The paper's CIFAR network, batch {result['batch']}: {source(result)}"])


@made_from("benchmarks/methods")
def methods(here: Result) -> str:
    """Steps on each device, then the time to measure importances."""
    gpu = load("benchmarks/methods_cuda") or {}
    columns = [
        ("CPU", here["step"], here["limits"]["cpu"]),
        (f"CPU, batch {here['small_batch']}", here["small_step"], {}),
        ("GPU", gpu.get("step"), {}),
        ("GPU, captured", gpu.get("captured"), here["limits"]["captured"]),
    ]
    columns = [column for column in columns if column[1]]
    lines = ["| a training step, plain = 1 | " + " | ".join(name for name, *_ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name in here["step"]:
        cells = [_ratio(found.get(name), limits.get(name)) for _, found, limits in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    measured = [
        (place, found["importance"]["methods"])
        for place, found in (("CPU", here), ("GPU", gpu))
        if "importance" in found
    ]
    lines += ["", "| importances of a task, in epochs | " + " | ".join(place for place, _ in measured) + " |"]
    lines.append("|---" * (len(measured) + 1) + "|")
    for name in measured[0][1]:
        known = [found.get(name) for _, found in measured]
        if any(one and one["epochs"]["median"] >= 0.05 for one in known):
            lines.append(
                f"| {name} | " + " | ".join(f"{one['epochs']['median']:.1f}" if one else "–" for one in known) + " |"
            )
    origins = [source(found) for found in (here, gpu) if found]
    return "\n".join([*lines, "", "; ".join(origins)])


def _ratio(found: dict[str, Any] | None, limit: float | None) -> str:
    """The median, with the limit it must keep; in italics where it does not."""
    if found is None or "error" in found:
        return "–"
    ratio = found["ratio"]["median"]
    if limit is None:
        return f"{ratio:.2f}"
    return f"{ratio:.3f} (≤ {limit:g})" if ratio <= limit else f"*{ratio:.3f}* (≤ {limit:g})"


@made_from("benchmarks/methods")
def avalanche(result: Result) -> str:
    if "avalanche" not in result:
        return ""
    theirs, small = result["avalanche"], result["small_batch"]
    titles = [f"a step, batch {result['batch']}", f"a step, batch {small}", "added, ms", "importances, epochs"]
    lines = ["| method | " + " | ".join(f"{title} | Avalanche's" for title in titles) + " |", "|---" * 9 + "|"]
    alike = {"ewc": f"ewc fisher=batched batch={result['batch']}", "mas": f"mas batch={result['batch']}"}
    for name in theirs["step"]:
        cells = []
        for what in ("step", "small_step"):
            cells += [f"{found[what][name]['ratio']['median']:.3f}" for found in (result, theirs)]
        cells += [f"{_added(found['small_step'][name]):.1f}" for found in (result, theirs)]
        for found, mine in ((result, alike.get(name, name)), (theirs, name)):
            cells.append(f"{found['importance']['methods'][mine]['epochs']['median']:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in theirs["versions"].items())
    return "\n".join([*lines, "", f"{versions}: {source(result)}"])


def _added(timed: dict[str, Any]) -> float:
    """Milliseconds beyond those of a plain step."""
    added: float = (timed["ratio"]["median"] - 1) * timed["plain_milliseconds"]["median"]
    return added


@made_from("benchmarks/fisher")
def fisher(result: Result) -> str:
    lines = [
        "| classes | fisher | sum, exact = 1 | distance from exact |",
        "|---|---|---|---|",
    ]
    for classes, forms in result["classes"].items():
        for form, one in forms.items():
            total, away = one["total"], one["away"]
            lines.append(
                f"| {classes} | {form} | {total['median']:.2g} ({total['range'][0]:.2g} to {total['range'][1]:.2g}) "
                f"| {away['median']:.2f} (at most {away['range'][1]:.2f}) |"
            )
    return "\n".join([*lines, "", f"{result['seeds']} seeds. {source(result)}"])


@made_from("omniglot5")
def omniglot5(result: Result) -> str:
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


@made_from("omniglot50")
def omniglot50(result: Result) -> str:
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


@made_from("digits_comparison")
def comparison(result: Result) -> str:
    lines = [
        "| method | average accuracy, % | plasticity | stability | forgetting, % |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["methods"].items():
        parts = [_spread_of(row[key], scale, digits) for key, scale, digits in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return "\n".join([*lines, "", f"Seeds 0 to {result['seeds'] - 1}. {source(result)}"])


CHOICES = ("agscl", "packnet", "wsn", "hat", "trgp", "lwf", "gpm", "ewc", "si", "finetune")


@made_from("digits_comparison")
def choice(result: Result) -> str:
    """What each method reached on digits and on images, and what it stores, for the page that helps to choose."""
    stored, images = load("memory"), load("tinyimagenet32")
    lines = [
        "| method | forgetting, digits, % | accuracy, digits, % | accuracy, Tiny ImageNet, % | stored, AlexNet |",
        "|---|---|---|---|---|",
    ]
    for name in CHOICES:
        row, bytes_ = result["methods"][name], "not measured"
        cells = [_spread_of(row[key], 100, 1) for key in ("forgetting", "average_accuracy")]
        on_images = (images or {"methods": {}})["methods"].get(name)
        cells.append(_spread_of(on_images["average_accuracy"], 100, 1) if on_images else "not measured")
        if stored and (found := stored["networks"]["alexnet"]["methods"].get(name)):
            amount = megabytes(found["counts"]["bytes"])
            bytes_ = "nothing" if amount == "–" else ("at most " if "bytes" in found["at_most"] else "") + amount
        lines.append(f"| {_title(name)} | {' | '.join(cells)} | {bytes_} |")
    files = ", ".join(f"`results/{name}.json`" for name in ("digits_comparison", "tinyimagenet32", "memory"))
    return "\n".join([*lines, "", f"Digits: {result['seeds']} seeds. From {files}."])


def compared(result: Result) -> str:
    """Every method of a comparison, with its settings: the first, the others by accuracy, then the bounds."""
    lines = [
        "| method | setting | seeds | average accuracy, % | lead of the first row, seed by seed | p | plasticity "
        "| stability | forgetting, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first, *others = result["methods"]
    others.sort(key=lambda name: (name in BOUNDS, -result["methods"][name]["average_accuracy"]["mean"]))
    ours = _by_seed(result["methods"][first])
    for name in (first, *others):
        row = result["methods"][name]
        strength = [f"{SYMBOLS.get(key, key)} {value:g}" for key, value in _numbers(row["settings"]).items()]
        parts = [_spread_of(row[key], scale, digits) for key, scale, digits in COLUMNS]
        lead = [ours[seed] - other for seed, other in _by_seed(row).items() if seed in ours]
        parts[1:1] = ["–", "–"] if name == first else [_spread_of(spread_over(lead), 100, 1), _paired_test(lead)]
        lines.append(
            f"| {_title(name)} | {', '.join(strength) or 'none'} | {len(row['seeds'])} | " + " | ".join(parts) + " |"
        )
    missing = "" if result["complete"] else " Some seeds have not run yet."
    note = f" {result['note']}" if "note" in result else ""
    return "\n".join(
        [
            *lines,
            "",
            f"Seeds 0, 1, 2, …, as many as the table says. p: that of a paired t-test of the lead.{missing}{note} "
            f"{source(result)}",
        ]
    )


@made_from("tinyimagenet32")
def images(result: Result) -> str:
    """The same in fewer columns, for README."""
    rows = result["methods"]
    lines = [
        "| method | setting | average accuracy, % | lead of AGS-CL, seed by seed | p | forgetting, % |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_drop_columns(line, (2, 6, 7)) for line in compared(result).splitlines()[2 : 2 + len(rows)]]
    seeds = len(rows["agscl"]["seeds"])
    return "\n".join(
        [*lines, "", f"{seeds} seeds, Tiny ImageNet at 32×32. p: that of a paired t-test. {source(result)}"]
    )


def _drop_columns(line: str, columns: tuple[int, ...]) -> str:
    cells = [cell for at, cell in enumerate(line.strip("| ").split(" | ")) if at not in columns]
    return f"| {' | '.join(cells)} |"


BOUNDS = ("separate", "joint")
"""What no method of continual learning is: a network per task, and all tasks at once."""


def _title(name: str) -> str:
    titles = {"packnet": "PackNet", "lwf": "LwF", "rwalk": "RWalk", "separate": "a network per task", "l2": "L2"}
    return NAMES.get(name) or titles.get(name) or (name if name in BOUNDS else name.upper())


def _numbers(settings: dict[str, Any]) -> dict[str, float]:
    """The strengths among a method's settings: what was searched, not which form of it ran."""
    return {key: float(settings[key]) for key in STRENGTHS if key in settings}


def _paired_test(leads: list[float]) -> str:
    """p of a two-sided paired t-test."""
    from scipy.stats import ttest_1samp

    if len(leads) < 3 or not statistics.stdev(leads):
        return "–"
    p = ttest_1samp(leads, 0.0).pvalue
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _by_seed(row: dict[str, Any]) -> dict[int, float]:
    return dict(zip(row["seeds"], row["average_accuracy"]["values"], strict=True))


@made_from("authors")
def authors(result: Result) -> str:
    """What the authors' code reached, and ours with the same settings where it ran with them."""
    lines = ["| data | method | setting | their code, % | ours, % | our seeds |", "|---|---|---|---|---|---|"]
    for name in ("tinyimagenet32", "omniglot-plain"):
        for row in result[name]:
            ours = _ours(name, row["method"], row["settings"])
            setting = ", ".join(f"{SYMBOLS[key]} {value:g}" for key, value in row["settings"].items())
            figure = _spread_of(spread_over(ours), 100, 1) if ours else "–"
            lines.append(
                f"| {name} | {row['method']} | {setting} | {100 * row['average_accuracy']:.1f} | {figure} | "
                f"{len(ours) or '–'} |"
            )
    ours = (
        "Ours: the row's seeds in `results/beside_authors.json`, `tinyimagenet32.json`, `omniglot-plain.json` or "
        "`benchmarks/whole_cuda.json`, whichever has the most; the commands are in these files."
    )
    return "\n".join([*lines, "", f"{result['note']} {ours}", *_widest()])


def _widest() -> list[str]:
    """The setting for which our seeds differ most, seed by seed."""
    rows = [row for row in (load("beside_authors") or {}).get("rows", []) if row["average_accuracy"]["deviation"]]
    if not rows:
        return []
    row = max(rows, key=lambda row: row["average_accuracy"]["deviation"])
    reached, forgot = (
        ", ".join(f"{100 * value:.{digits}f}" for value in row[key]["values"])
        for key, digits in (("average_accuracy", 1), ("forgetting", 0))
    )
    setting = ", ".join(f"{SYMBOLS[key]} {value:g}" for key, value in row["settings"].items())
    return ["", f"Our seeds differ most for {row['method']} at {setting}: {reached}, forgetting {forgot} points."]


def _ours(name: str, method: str, settings: dict[str, Any]) -> list[float]:
    """Average accuracies of this library's runs with these settings, from whichever result has most of them."""
    found: list[list[float]] = [[]]
    compared = ((load(name) or {}).get("methods") or {}).get(method)
    if compared and all(compared["settings"].get(key) == value for key, value in settings.items()):
        found.append(compared["average_accuracy"]["values"])
    for row in (load("beside_authors") or {}).get("rows", []):
        if (name, method, settings) == ("tinyimagenet32", row["method"], row["settings"]):
            found.append(row["average_accuracy"]["values"])
    whole = load("benchmarks/whole_cuda") or {}
    if whole and (name, method) == (whole["preset"], whole["method"]):
        full = {"mu": 10.0, "rho": 0.3, **whole["settings"]}
        if full == settings:
            found.append([run["average_accuracy"] for run in whole["side_by_side"]["runs"]])
    return max(found, key=len)


def spread_over(values: list[float]) -> dict[str, Any]:
    return {
        "mean": statistics.mean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def variants(result: Result) -> str:
    lines = [
        "| variant | average accuracy, % | gain, seed by seed | just learned, % | forgetting, % | free at the end |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        keys = ("average_accuracy", "gain", "learned", "forgetting", "free_at_the_end")
        parts = [_spread_of(row[key], 100, 1) for key in keys[:-1]] + [f"{100 * row[keys[-1]]['mean']:.0f} %"]
        if not row["gain"]["values"] or not any(row["gain"]["values"]):
            parts[1] = "–"
        lines.append(f"| {row['variant']} | " + " | ".join(parts) + " |")
    seeds = max(len(row["seeds"]) for row in result["rows"])
    return "\n".join([*lines, "", f"Seeds 0 to {seeds - 1}. {source(result)}"])


SYMBOLS = {"lam": "λ", "mu": "μ", "rho": "ρ", "c": "c"}
STRENGTHS = (*SYMBOLS, "share", "threshold", "weight")
STUDIED = "tinyimagenet32"
"""The preset whose studies are shown."""


def study(result: Result) -> str:
    """A line for each form; sparsity and used capacity after the second task and after the last."""
    lines = [
        "| | average accuracy, % | plasticity | stability | sparsity, % | used capacity, % |",
        "|---|---|---|---|---|---|",
    ]
    for line in result["lines"]:
        measured = [_spread_of(line[key], scale, digits) for key, scale, digits in COLUMNS[:3]]
        curves = [line["curves"].get(figure) for figure in ("sparsity", "used_capacity")]
        shares = [f"{100 * curve[1]:.0f} → {100 * curve[-1]:.0f}" if curve else "–" for curve in curves]
        lines.append(f"| {line['label']} | " + " | ".join([*measured, *shares]) + " |")
    seeds = max(len(line["seeds"]) for line in result["lines"])
    return "\n".join([*lines, "", f"Seeds 0 to {seeds - 1}. {source(result)}"])


def areas(result: Result) -> str:
    """The mean loss of accuracy while a tenth, a quarter, half and all of the nodes are pruned."""
    shares = (0.1, 0.25, 0.5, 1.0)
    ends = " | ".join(f"{100 * share:.0f} %" for share in shares)
    lines = [f"| after task | pruned first | {ends} |", "|---" * (len(shares) + 2) + "|"]
    seeds = list(result["seeds"].values())
    for after in seeds[0]["after"]:
        for order in seeds[0]["after"][after]["aopc"]:
            cells = []
            for share in shares:
                found = []
                for each in seeds:
                    pruned, aopc = each["after"][after]["pruned"], each["after"][after]["aopc"][order]
                    place = min(range(len(pruned)), key=lambda at: abs(pruned[at] - share * pruned[-1]))
                    found.append(aopc[place])
                cells.append(_spread_of(spread_over(found), 100, 1))
            lines.append(f"| {after} | {order} | " + " | ".join(cells) + " |")
    epochs = result["changes"].get("epochs")
    note = f"Points of accuracy, mean over all tasks learned; {len(seeds)} seed{'s' * (len(seeds) != 1)}"
    note += f", {epochs} epochs a task." if epochs else "."
    for after, found in seeds[0]["after"].items():
        if means := found.get("importances"):
            each = ", ".join(f"`{layer}` {mean:.2g}" for layer, mean in means.items())
            note += f" Mean importances after task {after}, first seed: {each}."
    return "\n".join([*lines, "", f"{note} {source(result)}"])


def _spread_of(measured: dict[str, Any], scale: float, digits: int) -> str:
    if measured["mean"] is None:
        return "–"
    deviation = measured["deviation"]
    spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
    return f"{round(scale * measured['mean'], digits) + 0.0:.{digits}f}{spread}"  # never -0.0


def search(result: Result) -> str:
    lines = ["| method | tried: average validation accuracy, % |", "|---|---|"]
    for name, tried in result["methods"].items():
        marks = [
            ", ".join(f"{SYMBOLS.get(key, key)} {value:g}" for key, value in each["settings"].items())
            + (": diverged" if each["valid_accuracy"] is None else ": " + _spread_of(_marks(each), 100, 1))
            for each in tried
        ]
        lines.append(f"| {name} | {'; '.join(marks)} |")
    stopped = result["stopped_early"]
    note = f" The search of {' and '.join(stopped)} is not finished." if stopped else ""
    last = result["seed"] + result.get("seeds", 1) - 1
    seeds = f"Seed {last}." if last == result["seed"] else f"Seeds {result['seed']} to {last}."
    return "\n".join([*lines, "", f"{seeds}{note} {source(result)}"])


def _marks(tried: dict[str, Any]) -> dict[str, Any]:
    return spread_over(tried.get("by_seed") or [tried["valid_accuracy"]])


@made_from("benchmarks/agree_cuda")
def agree(result: Result) -> str:
    lines = [
        "| configuration | seeds | average accuracy, % | difference from plain, seed by seed | forgetting, % |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["ways"].items():
        figures = [_spread_of(row[key], 100, 1) for key in ("average_accuracy", "forgetting")]
        figures.insert(1, "–" if name == "plain" else _difference_from_plain(result, name))
        lines.append(f"| {name} | {len(row['average_accuracy']['values'])} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", f"{result['epochs']} epochs a task. {source(result)}"])


def _difference_from_plain(result: dict[str, Any], name: str) -> str:
    """What a configuration gains or loses, seed by seed."""
    here, plain = (result["ways"][key]["average_accuracy"]["values"] for key in (name, "plain"))
    return _spread_of(spread_over([one - other for one, other in zip(here, plain, strict=True)]), 100, 1)


@made_from("benchmarks/agree_cuda_earlier")
def agreed_earlier(result: Result) -> str:
    """The same seeds at an earlier commit."""
    now = load("benchmarks/agree_cuda")
    if now is None:
        return ""
    then, since = (each["ways"]["plain"]["average_accuracy"]["mean"] for each in (result, now))
    found = [f"{_difference_from_plain(result, name)} ({name})" for name in result["ways"] if name != "plain"]
    return (
        f"The same seeds at an earlier commit ({result['commit']}): {', '.join(found)}. Since then the mean of plain "
        f"itself\nwent from {100 * then:.1f} to {100 * since:.1f}, on the same seeds."
    )


def _configurations(result: dict[str, Any]) -> list[str]:
    plain = result["ways"]["plain"]["ms_per_step"]
    lines = ["| configuration | ms per step | times as fast as plain |", "|---|---|---|"]
    return lines + [
        f"| {name} | {row['ms_per_step']:.2f} | {plain / row['ms_per_step']:.2f} |"
        for name, row in result["ways"].items()
    ]


@made_from("benchmarks/fast_cpu")
def fast_cpu(result: Result) -> str:
    lines = ["| configuration | ms per step | times as fast as plain | quartiles |", "|---|---|---|---|"]
    for name, row in result["ways"].items():
        figures = "1 | –"
        if name != "plain":
            slow, quick = (1 / ratio for ratio in reversed(row["ratio"]["quartiles"]))
            figures = f"{1 / row['ratio']['median']:.2f} | {slow:.2f} to {quick:.2f}"
        lines.append(f"| {name} | {row['ms_per_step']:.0f} | {figures} |")
    note = f"Medians over {result['rounds']} steps of each, alternating with plain ones, without ends of epochs."
    return "\n".join([*lines, "", f"{note} {source(result)}"])


def _alone(result: dict[str, Any]) -> str:
    if "alone" not in result:
        return ""
    first, again = (run["process_seconds"] for run in result["alone"].values())
    each = result["alone"]["again"].get("each", [])
    times = f" (median of {', '.join(f'{seconds:.1f}' for seconds in sorted(each))})" if each else ""
    return f"{first:.1f} s as a new process with nothing compiled before, {again:.1f} s the next time{times}. "


@made_from("benchmarks/fast_cuda")
def fast(result: Result) -> str:
    return "\n".join([*_configurations(result), "", *_parts_of_a_step(result), source(result)])


@made_from("benchmarks/whole_cuda")
def whole_runs(result: Result) -> str:
    whole, several = result["whole"], result["side_by_side"]
    seeds = len(several["runs"])
    return "\n".join(
        [
            f"All ten tasks of a hundred epochs in the last configuration, one seed: {whole['seconds']:.1f} s in a "
            f"process that is running already; {_alone(result)}{seeds} seeds at the same time"
            f"{' under MPS' if several.get('mps') else ''}, including the start of their processes: "
            f"{several['seconds']:.1f} s.",
            "",
            *_parts_of_a_run(result),
            source(result),
        ]
    )


@made_from("benchmarks/whole_cuda")
def goals(result: Result) -> str:
    """The goals, and what was reached."""
    whole, several = result["whole"]["seconds"], result["side_by_side"]["seconds"]
    again = result["alone"]["again"]["process_seconds"]
    return (
        f"The goals were {ONE} s for one seed, from start to end, and {FIVE} s for five. One takes {whole:.1f} s in a "
        f"process that is running already\nand {again:.1f} s as a new process; five take {several:.1f} s."
    )


@made_from("benchmarks/whole_cuda_earlier")
def earlier(whole: Result) -> str:
    """The same before our own kernels."""
    one, again = whole["whole"]["seconds"], whole["alone"]["again"]["process_seconds"]
    return (
        f"Before we had our own kernels ({whole['commit']}), one took {one:.1f} s, {again:.1f} s as a new process, and "
        f"five took\n{whole['side_by_side']['seconds']:.1f} s."
    )


ONE, FIVE = 20, 60
"""The goals in seconds for one seed and for five seeds of `tinyimagenet32` on an H200."""


@made_from("benchmarks/whole_cuda")
def one_run(result: Result) -> str:
    first, again = (run["process_seconds"] for run in result["alone"].values())
    return (
        f"On `tinyimagenet32`, which has as many images, AGS-CL alone took {first:.0f} s from the start of the "
        f"process to its end, and {again:.0f} s\nwhen the network had been compiled before, "
        f"{result['alone']['again']['training_seconds']:.0f} s of them for the ten tasks."
    )


@made_from("benchmarks/whole_cuda")
def several_runs(result: Result) -> str:
    runs, seconds = result["side_by_side"]["runs"], result["side_by_side"]["seconds"]
    return f"On `tinyimagenet32`, {len(runs)} runs of AGS-CL at the same time took {seconds:.0f} s in all."


@made_from("tinyimagenet32")
def table_runs(result: Result) -> str:
    """How long the runs of a comparison took."""
    seconds = {name: row["seconds"] for name, row in result["methods"].items()}
    slowest = max(seconds, key=lambda name: statistics.mean(seconds[name]))
    slow = seconds.pop(slowest)
    quick = [each for some in seconds.values() for each in some]
    return (
        f"For the table of `tinyimagenet32` a run took {min(quick):.0f} to {max(quick):.0f} s, one of "
        f"{_title(slowest)} {min(slow):.0f} to {max(slow):.0f} s,\n{result['jobs']} of them at the same time on a GPU."
    )


@made_from("cifar10-tiny")
def large_runs(result: Result) -> str:
    seconds = [each for row in result["methods"].values() for each in row["seconds"]]
    return (
        f"On `cifar10-tiny` a run took {min(seconds):.0f} to {max(seconds):.0f} s, {result['jobs']} at the same time "
        "on a shared GPU."
    )


def cluster_times() -> str:
    """What the measured tables take on more GPUs, if as many runs share each of them as did when they were measured."""
    lines = ["| table | methods × seeds | runs at a time | a run | one H200 | eight | one for each run |"]
    lines.append("|---" * 7 + "|")
    total, longest = 0.0, 0.0
    for name in ("tinyimagenet32", "cifar10-tiny", "five", "omniglot-plain"):
        result = load(name)
        if result is None:
            return ""
        seconds = [each for row in result["methods"].values() for each in row["seconds"]]
        seeds, jobs = max(len(row["seconds"]) for row in result["methods"].values()), result["jobs"]
        spent = [max(sum(seconds) / (gpus * jobs), max(seconds)) / 60 for gpus in (1, 8, len(seconds))]
        total, longest = total + spent[0], max(longest, spent[2])
        lines.append(
            f"| `{name}` | {len(result['methods'])} × {seeds} | {jobs} | {min(seconds):.0f} to {max(seconds):.0f} s | "
            + " | ".join(f"{minutes:.0f} min" for minutes in spent)
            + " |"
        )
    spent = [total, max(total / 8, longest), longest]
    lines.append("| all, at the same time | | | | " + " | ".join(f"{minutes:.0f} min" for minutes in spent) + " |")
    return "\n".join(lines)


PAPER_STEPS = {
    "cifar100": 10 * 100 * math.ceil(4500 / 256),
    "cifar10-100": 100 * math.ceil(45_000 / 256) + 10 * 100 * math.ceil(4500 / 256),
    "omniglot": 204_900,
    "cub200": 6_000,
    "eight": 119_000,
}
"""Optimizer steps in a run: for each task, epochs × batches. Those of `cub200` and `eight` are rounded."""
STAND_INS = {
    "cifar100": ("tinyimagenet32", PAPER_STEPS["cifar100"]),
    "cifar10-100": ("cifar10-tiny", PAPER_STEPS["cifar10-100"]),
    "omniglot": ("omniglot-plain-fast", 12_200),
    "eight": ("five", 78_700),
}
"""What was measured in place of the paper's data, on the same network with the same batches, and its steps per run."""
PAPER_METHODS = {
    "cifar100": ("paper-agscl", "ewc", "si", "rwalk", "mas", "hat", "finetune"),
    "cifar10-100": ("paper-agscl", "ewc", "si", "rwalk", "mas", "hat", "finetune"),
    "omniglot": ("paper-agscl", "ewc", "si", "rwalk", "mas", "hat", "finetune"),
    "cub200": ("paper-agscl", "ewc", "si", "rwalk", "mas", "finetune"),
    "eight": ("paper-agscl", "ewc", "mas", "finetune"),
}
PAPER_SEEDS = 5
ALEXNET_STEP = 64 * 714 / (256 * 39)
"""A step of AlexNet (64 images of 224 × 224) in steps of the CIFAR network (256 of 32 × 32), by millions of
multiplications for an image."""
ALEXNET_DOUBT = 5
"""It may take so many times as long: each step moves 59 million weights with their optimizer, and crops images."""


def estimate_shares(preset: str) -> dict[str, tuple[list[float], str]]:
    """By method, the seconds of a whole GPU that a run takes, of each seed measured, and where they come from.

    Several runs shared the GPU: a run's share of it is its seconds over their number.
    """

    def measure(name: str, factor: float, word: str) -> dict[str, tuple[list[float], str]]:
        result = load(name)
        assert result is not None, f"results/{name}.json is missing"
        rows = result["methods"].items()
        return {key: ([factor * one / result["jobs"] for one in row["seconds"]], word) for key, row in rows}

    step = measure("tinyimagenet32", PAPER_STEPS[preset] / PAPER_STEPS["cifar100"], "scaled by steps")
    if preset == "cub200":
        factors = (ALEXNET_STEP, ALEXNET_STEP * ALEXNET_DOUBT)
        scaled = {key: [factor * one for factor in factors for one in values] for key, (values, _) in step.items()}
        return {key: (scaled[key], "scaled by multiplications") for key in PAPER_METHODS[preset]}
    name, steps = STAND_INS[preset]
    factor = PAPER_STEPS[preset] / steps
    found = measure(name, factor, "measured" if factor == 1 else "scaled by steps")
    slower = statistics.mean(found["paper-agscl"][0]) / statistics.mean(step["paper-agscl"][0])
    others = {key: ([slower * one for one in values], "scaled by method") for key, (values, _) in step.items()}
    return {key: found.get(key) or others[key] for key in PAPER_METHODS[preset]}


def paper_runs() -> str:
    """For each of the paper's datasets and methods, the share of a GPU that a run takes."""
    titles = {"paper-agscl": "AGS-CL, the paper's form", "finetune": "fine-tuning", "rwalk": "RWALK"}
    columns = PAPER_METHODS["cifar100"]
    lines = ["| seconds of one H200 per run | steps | " + " | ".join(titles.get(m, m.upper()) for m in columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    marks = {"measured": "", "scaled by steps": "ˢ", "scaled by method": "ᵐ", "scaled by multiplications": "ˣ"}
    for preset in PAPER_METHODS:
        shares = estimate_shares(preset)
        cells = [
            _range(*(f"{pick(shares[method][0]):.0f}" for pick in (min, max))) + marks[shares[method][1]]
            if method in shares
            else "–"
            for method in columns
        ]
        lines.append(f"| `{preset}` | {PAPER_STEPS[preset]:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def paper_costs() -> str:
    """What the paper's table takes on one GPU, on eight, and with a GPU for each run."""
    found = _alone_and_shared()
    if found is None:
        return ""
    alone = found[0] / found[1]
    lines = ["| | runs | GPU hours | one H200 | eight | a GPU for each run |", "|---" * 6 + "|"]
    totals: dict[str, float] = {"runs": 0, "low": 0, "high": 0, "longest": 0}
    for preset in PAPER_METHODS:
        shares = [values for values, _ in estimate_shares(preset).values()]
        runs = PAPER_SEEDS * len(shares)
        low, high = (PAPER_SEEDS * sum(map(pick, shares)) / 3600 for pick in (min, max))
        longest = alone * max(map(max, shares)) / 3600
        lines.append(_cost_row(f"`{preset}`", runs, low, high, longest))
        for key, value in (("runs", runs), ("low", low), ("high", high)):
            totals[key] += value
        totals["longest"] = max(totals["longest"], longest)
    lines.append(_cost_row("all five", round(totals["runs"]), totals["low"], totals["high"], totals["longest"]))
    return "\n".join(lines)


def _alone_and_shared() -> tuple[float, float, int] | None:
    """Seconds of a GPU that a run takes alone, its share when several ran side by side, and how many these were."""
    whole, shared = load("benchmarks/whole_runs_cuda"), load("tinyimagenet32")
    if whole is None or shared is None:
        return None
    alone = statistics.mean(run["training_seconds"] for run in whole["methods"]["paper-agscl"]["runs"])
    return alone, statistics.mean(shared["methods"]["paper-agscl"]["seconds"]) / shared["jobs"], shared["jobs"]


def _cost_row(title: str, runs: int, low: float, high: float, longest: float) -> str:
    spent = [max(high / gpus, longest) for gpus in (1, 8, runs)]
    return f"| {title} | {runs} | {_range(f'{low:.1f}', f'{high:.1f}')} | " + " | ".join(map(_duration, spent)) + " |"


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{math.ceil(60 * hours)} min"


@made_from("benchmarks/whole_runs_cuda")
def shared_or_alone(result: Result) -> str:
    found = _alone_and_shared()
    if found is None:
        return ""
    alone, share, jobs = found
    return (
        f"On `tinyimagenet32` a run of AGS-CL in its paper's form, alone on its GPU, took {alone:.1f} s, without the "
        f"start of the process; of {jobs} side by side\neach took {share:.1f} s of the GPU, so alone "
        f"{alone / share:.1f} times as long. {source(result)}"
    )


@made_from("benchmarks/whole_runs_cuda")
def budget_cost(result: Result) -> str:
    """How long a whole run takes with a budget, and in the paper's form."""
    ours, paper = (result["methods"][name]["process_seconds"]["median"] for name in ("agscl", "paper-agscl"))
    times = next(row["times_as_long"] for row in result["times_as_long"] if row["method"] == "agscl")
    count = len(result["methods"]["agscl"]["runs"])
    return (
        f"With a budget, the default, a whole run of `tinyimagenet32` takes {ours:.1f} s from the start of its process "
        f"to its end, in the paper's form {paper:.1f} s:\n{times['median']:.2f} times as long (rounds from "
        f"{times['certain'][0]:.2f} to {times['certain'][1]:.2f}; {count} rounds). {source(result)}"
    )


@made_from("atari8-short")
def atari_games(result: Result) -> str:
    """Each game's score when it was just learned and at the end, of AGS-CL and fine-tuning."""
    runs = [result["methods"][name] for name in ("agscl", "finetune")]
    learned = min(run["tasks_learned"] for run in runs)
    lines = [
        f"| | AGS-CL: just learned | after {learned} games | fine-tuning: just learned | after {learned} games |",
        "|---|---|---|---|---|",
    ]
    for task in range(learned):
        name = next(one["name"] for one in runs[0]["evaluations"] if one["task"] == task)
        cells = [_format_score(_last_evaluation(run, at)["scores"][task]) for run in runs for at in (task, learned - 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sums = [f"{_last_evaluation(run, learned - 1)['accumulated_reward']:.2f}" for run in runs]
    lines.append(f"| accumulated reward | | {sums[0]} | | {sums[1]} |")
    return "\n".join([*lines, "", f"{result['note']} {source(result)}"])


def _last_evaluation(run: Result, task: int) -> dict[str, Any]:
    """The last evaluation while `task` was learned: at its end, if that was reached."""
    found: dict[str, Any] = [one for one in run["evaluations"] if one["task"] == task][-1]
    return found


def _format_score(score: float) -> str:
    return f"{score:,.0f}" if abs(score) >= 100 else f"{score:.3g}"


@made_from("atari8-short")
def atari_figures(result: Result) -> str:
    """Plasticity and stability, game by game, and the nodes taken."""
    ours, reference = (result["methods"][name] for name in ("agscl", "finetune"))
    learned = min(ours["tasks_learned"], reference["tasks_learned"])
    just = [[_last_evaluation(run, task)["scores"][task] for task in range(learned)] for run in (ours, reference)]
    plasticity = [mine / other for mine, other in zip(*just, strict=True)]
    names = [_last_evaluation(ours, task)["name"] for task in range(learned)]
    shown = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, plasticity, strict=True))
    best = [max(one["scores"][task] for one in ours["evaluations"] if one["task"] >= task) for task in range(learned)]
    stability = [score / high for score, high in zip(_last_evaluation(ours, learned - 1)["scores"], best, strict=True)]
    left = [
        _last_evaluation(reference, task + 1)["scores"][task] / _last_evaluation(reference, task)["scores"][task]
        for task in range(learned - 1)
    ]
    next_game = ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(names, left, strict=False))
    shares = [run["evaluation_seconds"] / run["seconds"] for run in (ours, reference)]
    layers = ours["capacity"][-1]
    taken = ", ".join(f"{layer['taken']} of {layer['nodes']}" for layer in layers)
    return (
        f"Plasticity of AGS-CL, its score on a game just learned over that of fine-tuning: {shown};\non average "
        f"{statistics.mean(plasticity):.2f}. Its stability, the score at the end over the best, is between "
        f"{min(stability):.3f} and {max(stability):.3f}. After {learned} games it has\ntaken, layer by layer, {taken} "
        f"nodes. What fine-tuning keeps of a game's score while the next game is learned: {next_game}.\nEvaluations, "
        f"two for each game, took {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the time."
    )


@made_from("atari8-short")
def atari_headline(result: Result) -> str:
    """For the README."""
    runs = {name: result["methods"][name] for name in ("agscl", "finetune")}
    learned = min(run["tasks_learned"] for run in runs.values())
    sums = {name: _last_evaluation(run, learned - 1)["accumulated_reward"] for name, run in runs.items()}
    return (
        f"{learned} of the paper's eight Atari games, one after the other, 10⁶ steps each, one seed: at the end the "
        f"scores, each relative to\nfine-tuning's best on that game, add up to {sums['agscl']:.1f} with AGS-CL and to "
        f"{sums['finetune']:.1f} with fine-tuning."
    )


@made_from("atari8-short-cut-off")
def atari_cut_off(result: Result) -> str:
    """The scores of all games so far when each of the first three was learned, of an earlier run with EWC and MAS."""
    lines = ["| method | just learned | played greedily: all games so far |", "|---|---|---|"]
    for name in ("ewc", "mas"):
        run = result["methods"][name]
        games = list(dict.fromkeys(one["name"] for one in run["evaluations"]))
        for task, game in enumerate(games):
            scores = zip(games, _last_evaluation(run, task)["scores"], strict=False)
            shown = ", ".join(f"{each} {_format_score(score)}" for each, score in scores)
            lines.append(f"| {_title(name)} | {game} | {shown} |")
    return "\n".join([*lines, "", f"Not finished: cut off in the fourth of eight games. {source(result)}"])


@made_from("atari8-short-cut-off")
def atari_unused_nodes(result: Result) -> str:
    """How many nodes of the second game's budget were used, and what its frozen and fresh nodes look like."""
    run = result["methods"]["agscl"]
    first, second = run["capacity"][:2]
    given, used = (sum(layer["taken_by_last"] for layer in layers) for layers in (first, second))
    nodes = next(game["nodes"] for game in run["activations"]["games"] if game["game"] == "boxing")
    layer = {each["since"]: each for each in nodes if each["layer"] == second[1]["layer"]}
    frozen, fresh = layer["star_gunner"], layer["being learned"]
    unused = [each["layer"] for each in second if not each["taken_by_last"]]
    return (
        f"Of the {given} nodes that AGS-CL gave boxing {used} were in use at its end, none of them in "
        f"`{', '.join(unused)}`. On boxing's pictures the nodes\nof `{second[1]['layer']}` that are frozen since "
        f"star_gunner have a mean activation of {frozen['mean_activation']:.1f}, and fresh ones of "
        f"{fresh['mean_activation']:.1f}. {source(result)}"
    )


@made_from("benchmarks/ppo_cuda")
def atari_cost_on_gpu(result: Result) -> str:
    rate = result["contenders"]["ours, AGS-CL"]["steps_per_second"]
    low, high = rate["quartiles"]
    hours = 8e7 / rate["median"] / 3600
    return (
        f"Measured: {rate['median']:,.0f} steps per second with AGS-CL (quartiles {low:,.0f} to {high:,.0f}), training "
        f"included and evaluation not.\nAt that rate the paper's eight games take {hours:.1f} hours of an H200, "
        f"and four methods with five seeds {20 * hours:.0f}. {source(result)}"
    )


@made_from("benchmarks/ppo")
def atari_cost(result: Result) -> str:
    settings, ours = result["settings"], result["contenders"]["ours, AGS-CL"]["steps_per_processor_second"]
    low, high = ours["quartiles"]
    return (
        f"Measured: {ours['median']:.0f} steps per second of one processor core (quartiles {low:.0f} to {high:.0f}) "
        f"with AGS-CL, {result['filters']} filters where the paper has 128,\n{settings['environments']} environments × "
        f"{settings['rollout']} steps, {settings['epochs']} passes where the paper has 10. At that rate a run of "
        f"8 · 10⁷ steps takes {8e7 / ours['median'] / 3600:.0f} hours of a core; the\npaper's takes many times that. "
        f"{source(result)}"
    )


@made_from("search/tinyimagenet32-budget")
def budget_choice(result: Result) -> str:
    """The variants that ran on both of the first two seeds, the best first."""
    both = {
        name: [dict(zip(row["seeds"], row["valid_accuracy"], strict=True))[seed] for seed in (1000, 1001)]
        for name, row in result["variants"].items()
        if {1000, 1001} <= set(row["seeds"])
    }
    lines = ["| variant | average validation accuracy, %, of seeds 1000 and 1001 | mean |", "|---|---|---|"]
    for name, values in sorted(both.items(), key=lambda row: -statistics.mean(row[1])):
        cells = ", ".join(f"{100 * value:.1f}" for value in values)
        label = name.replace("today's default", "the default then")
        lines.append(f"| {label} | {cells} | {100 * statistics.mean(values):.1f} |")
    return "\n".join([*lines, "", f"{result['note'].capitalize()}: {source(result)}"])


@made_from("search/tinyimagenet32-ten-epochs")
def ten_epochs(result: Result) -> str:
    lines = ["| variant | average validation accuracy, % |", "|---|---|"]
    lines += [f"| {name} | {100 * row['valid_accuracy']:.1f} |" for name, row in result["variants"].items()]
    return "\n".join([*lines, "", f"Seed 1000: {source(result)}"])


@made_from("benchmarks/ppo_cuda")
def ppo_cuda(result: Result) -> str:
    lines = ["| | environment steps per second, training included |", "|---|---|"]
    lines += [
        f"| {name} | {row['steps_per_second']['median']:,.0f} |".replace("ours, not captured", "ours, eager")
        for name, row in result["contenders"].items()
    ]
    return "\n".join([*lines, "", f"{result['game']}: {source(result)}"])


@made_from("unseen")
def unseen(result: Result) -> str:
    names = list(result["sequences"][0]["accuracies"])
    lines = [f"| sequence | network, epochs, optimizer | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    means: dict[str, list[float]] = {name: [] for name in names}
    for row in result["sequences"]:
        setting = f"{row['network']}, {row['epochs']}, {row['optimizer']}"
        cells = [spread(row["accuracies"][name]) for name in names]
        lines.append(f"| {row['sequence']} | {setting} | {' | '.join(cells)} |")
        for name in names:
            means[name].append(statistics.mean(row["accuracies"][name]))
    lines.append(f"| mean | | {' | '.join(f'{statistics.mean(means[name]):.1f}' for name in names)} |")
    return "\n".join([*lines, "", f"{len(result['seeds'])} seeds. {source(result)}"])


@made_from("unseen")
def unseen_means(result: Result) -> str:
    rows = [row["accuracies"] for row in result["sequences"]]
    means = {name: statistics.mean(statistics.mean(row[name]) for row in rows) for name in rows[0]}
    ordered = sorted(means, key=means.__getitem__, reverse=True)
    listed = ", ".join(f"{name} {means[name]:.1f}" for name in ordered)
    return f"Mean of {len(rows)} sequences, {len(result['seeds'])} seeds, average accuracy in %: {listed}."


@made_from("control")
def control(result: Result) -> str:
    lines = ["| | seeds | average score, % | forgetting, % | accumulated reward |", "|---|---|---|---|---|"]
    titles = {"agscl": "AGS-CL", "finetune": "fine-tuning"}
    for name, row in result["methods"].items():
        title = titles.get(name, f"{name.upper()}, λ {row['settings'].get('lam', 0):g}")
        cells = [_spread_of(row[key], 100, 1) for key in ("average_accuracy", "forgetting")]
        cells.append(_spread_of(row["accumulated_reward"], 1, 2))
        lines.append(f"| {title} | {len(row['seeds'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@made_from("benchmarks/fast_cuda")
def without_fast(result: Result) -> str:
    """Seconds for the ten tasks without --fast: with captured steps, and with steps one by one."""
    plain, captured = (result["ways"][name]["ms_per_step"] for name in ("plain", "captured"))
    return (
        f"Without it a method's ten tasks take {STEPS * captured / 1000:.0f} s, at {captured:.1f} ms per step. On a "
        f"GPU steps run as CUDA graphs either way;\n`--set engine=plain` turns that off ({STEPS * plain / 1000:.0f} s)."
    )


STEPS = 10 * 100 * math.ceil(4500 / 256)
"""Steps in a run of `tinyimagenet32`: tasks × epochs × batches."""


@made_from("cuda_tests")
def cuda_tests(result: Result) -> str:
    counts, failed = result["counts"], [name.partition("::")[2] for name in result["failed"]]
    ran, skipped = sum(counts.values()) - counts.get("skipped", 0), counts.get("skipped", 0)
    ended = f"{len(failed)} of {ran} failed: {', '.join(f'`{name}`' for name in failed)}" if failed else "passed"
    tests = "" if failed else f"All {ran} that ran "
    skips = f"; {skipped} were skipped, each with a reason" if skipped else ""
    return f"{tests}{ended}{skips}. {source(result)}"


@made_from("forms")
def one_seed(result: Result) -> str:
    """The λ that one seed chose, on other seeds, compared with the λ that three seeds chose."""
    chosen, other = result["rows"][0], load("tinyimagenet32")
    if other is None:
        return ""
    then = other["methods"]["paper-agscl"]
    return (
        f"A search on one seed chose λ {chosen['settings']['lam']:g} for the paper's form on `tinyimagenet32`. On "
        f"seeds 0 to 4 it reaches\n{_spread_of(chosen['average_accuracy'], 100, 1)} % with it and forgets "
        f"{_spread_of(chosen['forgetting'], 100, 1)} points. With λ {then['settings']['lam']:g}, which three seeds "
        f"chose, it reaches\n{_spread_of(then['average_accuracy'], 100, 1)} % and forgets "
        f"{_spread_of(then['forgetting'], 100, 1)}."
    )


def _parts_of_a_step(result: dict[str, Any]) -> list[str]:
    if "step" not in result:
        return []
    spent, count = result["step"]["microseconds"], result["step"]["kernels"]
    parts = ", ".join(f"{part} {time:.0f}" for part, time in spent.items())
    return [f"A step runs {count:.0f} kernels, which take {sum(spent.values()):.0f} µs on the GPU: {parts}.", ""]


def _parts_of_a_run(result: dict[str, Any]) -> list[str]:
    """Where the time of a new process goes."""
    if "alone" not in result:
        return []
    first, again = result["alone"].values()
    alone, together = again["training_seconds"], [run["training_seconds"] for run in result["side_by_side"]["runs"]]
    return [
        f"A new process spends {again['process_seconds'] - again['seconds']:.1f} s on starting Python, importing "
        f"torch and ending, {again['seconds'] - alone:.1f} s on loading data and starting CUDA, and the first time "
        f"{first['training_seconds'] - alone:.1f} s on compiling. {len(together)} runs at the same time fill the GPU: "
        f"training took each of them {statistics.mean(together) / alone:.1f} times as long as one alone.",
        "",
    ]


@made_from("contract")
def contract(result: Result) -> str:
    cells = {(row["method"], row["network"], row["optimizer"]): row for row in result["cells"]}
    columns = list(dict.fromkeys((network, optimizer) for _, network, optimizer in cells))
    passed = sum(row["checks"] == "passed" and not row["complaint"] for row in cells.values())
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
    commits = dict.fromkeys(row["commit"].split()[0][:7] for row in cells.values())
    note = f"{passed} of {len(cells)} cells pass; others are in italics. Measured at {', '.join(commits)}; the last:"
    return "\n".join([*lines, "", f"{note} {source(result)}"])


@made_from("memory")
def memory(result: Result) -> str:
    networks = result["networks"]
    lines = [
        "| network, after so many tasks | importances: AGS-CL | EWC | ratio | EWC with its anchors | ratio "
        "| all numbers stored: AGS-CL, at most | EWC | ratio, at least |",
        "|---" * 9 + "|",
    ]
    for name, network in networks.items():
        ours, theirs = network["methods"]["agscl"], network["methods"]["ewc"]
        few, many, whole = ours["counts"]["importances"], theirs["counts"]["importances"], theirs["everything"]
        lines.append(
            f"| {name}, {network['tasks']} | {few:,} | {many:,} | {many / few:,.0f} | {whole:,} | {whole / few:,.0f} "
            f"| {ours['everything']:,} | {whole:,} | {math.floor(100 * whole / ours['everything']) / 100:.2f} |"
        )
    lines += ["", "All bytes, by method and network:", "", "| | " + " | ".join(networks) + " |"]
    lines += ["|---" * (len(networks) + 1) + "|"]
    for name in next(iter(networks.values()))["methods"]:
        rows = [network["methods"][name] for network in networks.values()]
        cells = [("≤ " if "bytes" in row["at_most"] else "") + megabytes(row["counts"]["bytes"]) for row in rows]
        lines.append(f"| {rename_settings(name)} | " + " | ".join(cells) + " |")
    if "alexnet" in networks:
        lines += ["", *memory_by_purpose("alexnet", networks["alexnet"])]
    cells = [row["agrees"] for network in networks.values() for row in network["methods"].values()]
    lines += [
        "",
        f"≤ marks upper bounds of what depends on training; all else is exact. In {sum(cells)} of {len(cells)} cases a "
        "method that learned two tasks of random images on the real network stored, after each, what was forecast. "
        f"{source(result)}",
    ]
    return "\n".join(lines)


def rename_settings(label: str) -> str:
    """A label of a stored result, with today's names of settings."""
    return label.replace("fresh=start", "reinit_from=start")


def memory_by_purpose(name: str, network: dict[str, Any]) -> list[str]:
    """What is stored for one network, by purpose."""
    purposes = ["importances", "anchors", "masks", "embeddings", "bases", "start"]
    titles = [{"start": "initial weights"}.get(purpose, purpose) for purpose in purposes]
    lines = [f"For {name}, in numbers:", "", "| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for method, row in network["methods"].items():
        counts = [(row["counts"].get(purpose, 0), purpose in row["at_most"]) for purpose in purposes]
        cells = [f"{'≤ ' if bound else ''}{count:,}" if count else "–" for count, bound in counts]
        lines.append(f"| {rename_settings(method)} | " + " | ".join(cells) + " |")
    return lines


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB" if count else "–"


SECTIONS: dict[str, Callable[[], str]] = {
    "digits": digits,
    "overhead": overhead,
    "methods": methods,
    "avalanche": avalanche,
    "fisher": fisher,
    "omniglot5": omniglot5,
    "omniglot50": omniglot50,
    "comparison": comparison,
    "choice": choice,
    "tinyimagenet32": made_from("tinyimagenet32")(compared),
    "search": made_from("search/tinyimagenet32")(search),
    "search-rivals": made_from("search/tinyimagenet32-rivals")(search),
    "search-wide": made_from("search/tinyimagenet32-wide")(search),
    "cifar10-tiny": made_from("cifar10-tiny")(compared),
    "five": made_from("five")(compared),
    "search-five": made_from("search/five")(search),
    "omniglot-plain": made_from("omniglot-plain")(compared),
    "omniglot-plain-fast": made_from("omniglot-plain-fast")(compared),
    "omniglot-plain-frozen": made_from("omniglot-plain-frozen")(compared),
    "beyond": made_from("beyond")(variants),
    "forms": made_from("forms")(variants),
    **{f"study-{name}": made_from(f"studies/{STUDIED}-{name}")(study) for name in ("reinit", "rho", "prox")},
    "study-aopc": made_from(f"studies/{STUDIED}-aopc")(areas),
    "authors": authors,
    "fast": fast,
    "whole-runs": whole_runs,
    "budget-cost": budget_cost,
    "images": images,
    "goals": goals,
    "earlier": earlier,
    "agreed-earlier": agreed_earlier,
    "one-run": one_run,
    "several-runs": several_runs,
    "one-seed": one_seed,
    "table-runs": table_runs,
    "large-runs": large_runs,
    "cluster-times": cluster_times,
    "control": control,
    "ppo-cuda": ppo_cuda,
    "budget-choice": budget_choice,
    "ten-epochs": ten_epochs,
    "unseen": unseen,
    "unseen-means": unseen_means,
    "paper-runs": paper_runs,
    "paper-costs": paper_costs,
    "shared-or-alone": shared_or_alone,
    "atari-cost-on-gpu": atari_cost_on_gpu,
    "atari-games": atari_games,
    "atari-figures": atari_figures,
    "atari-headline": atari_headline,
    "atari-cut-off": atari_cut_off,
    "atari-unused-nodes": atari_unused_nodes,
    "atari-cost": atari_cost,
    "without-fast": without_fast,
    "cuda-tests": cuda_tests,
    "agree": agree,
    "fast-cpu": fast_cpu,
    "contract": contract,
    "memory": memory,
}


def fill_sections(text: str) -> str:
    """The page with the content of each section, between its markers, made from results."""
    for name, make in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name}: made by make docs -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda found, make=make: f"{found[1]}{make() or 'Not measured yet.'}\n{found[2]}", text)
    return text


def draw() -> None:
    """Accuracy on every task after every task, fine-tuning and AGS-CL side by side."""
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


def draw_methods() -> None:
    """Average accuracy after each task, method by method, as in the paper's figure."""
    import matplotlib.pyplot as plt

    result = load("tinyimagenet32")
    if result is None:
        return
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    best_first = sorted(result["methods"].items(), key=lambda item: -item[1]["average_accuracy"]["mean"])
    for number, (name, row) in enumerate(best_first):
        curves = [[100 * statistics.mean(after) for after in accuracies] for accuracies in row["accuracies"]]
        at = range(1, len(curves[0]) + 1)
        means = [statistics.mean(values) for values in zip(*curves, strict=True)]
        style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "linewidth": 1}
        if name.endswith("agscl"):
            style |= {"color": "black", "linestyle": "-" if name == "agscl" else ":", "linewidth": 2.2}
        axis.plot(at, means, marker=".", label=_title(name), **style)
        if name == "agscl":
            wide = [statistics.stdev(values) for values in zip(*curves, strict=True)]
            low, high = ([mean + sign * one for mean, one in zip(means, wide, strict=True)] for sign in (-1, 1))
            axis.fill_between(at, low, high, color="black", alpha=0.12, linewidth=0)
    axis.set(title="tinyimagenet32", xlabel="after task", ylabel="average accuracy of the tasks so far, %")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.grid(alpha=0.3)
    figure.savefig(HOME / "docs" / "tinyimagenet32.svg", metadata={"Date": None})


def draw_studies() -> None:
    """The paper's analyses: capacity, trade-off, importances, and the forms of AGS-CL task by task."""
    import matplotlib.pyplot as plt

    studies = {name: load(f"studies/{STUDIED}-{name}") for name in ("reinit", "tradeoff", "aopc", "rho", "prox")}
    if None in studies.values():
        return
    lines = {name: (found or {}).get("lines", []) for name, found in studies.items()}
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    capacity, tradeoff, aopc, forms = axes.flat

    for line in lines["reinit"]:
        if line["label"] in (NAMES["paper-agscl"], "without both"):
            style = "-" if line["label"] == NAMES["paper-agscl"] else "--"
            for key, color, what in (("sparsity", "C3", "sparsity"), ("used_capacity", "C0", "used capacity")):
                curve = [100 * share for share in line["curves"][key]]
                at = range(1, len(curve) + 1)
                capacity.plot(at, curve, style, color=color, marker=".", label=f"{what}, {line['label']}")
    capacity.set(title="Nodes, with and without re-initialisation", xlabel="after task", ylabel="%")

    marks = {NAMES["paper-agscl"]: "*"}
    for label in dict.fromkeys(line["label"].split(", λ")[0] for line in lines["tradeoff"][1:]):
        mine = [line for line in lines["tradeoff"] if line["label"].startswith(f"{label}, λ")]
        points = [[line[key]["mean"] for line in mine] for key in ("stability", "plasticity")]
        tradeoff.plot(*points, marker=marks.get(label, "."), linestyle=":", label=label)
    tradeoff.set(title="Over λ", xlabel="stability", ylabel="plasticity")

    seeds = [each["after"] for each in (studies["aopc"] or {})["seeds"].values()]
    for color, after in zip(("C0", "C1"), seeds[0], strict=True):
        for order, style in (("highest", "-"), ("random", ":"), ("lowest", "--")):
            pruned = [100 * count / seeds[0][after]["pruned"][-1] for count in seeds[0][after]["pruned"]]
            curves = zip(*[each[after]["aopc"][order] for each in seeds], strict=True)
            mean = [100 * statistics.mean(values) for values in curves]
            tasks = "task" if after == "1" else "tasks"
            aopc.plot(pruned, mean, style, color=color, label=f"{order} first, after {after} {tasks}")
    aopc.set(title="Accuracy lost, mean so far (AOPC)", xlabel="nodes pruned, %", ylabel="points")
    aopc.set_ylim(top=1.5 * aopc.get_ylim()[1])  # room for the legend

    for line in [*lines["rho"][1:], *lines["prox"][2:]]:
        curve = [100 * share for share in line["curves"]["average_accuracy"]]
        forms.plot(range(1, len(curve) + 1), curve, marker=".", label=line["label"])
    forms.set(title="Average accuracy task by task", xlabel="after task", ylabel="%")
    for axis in (capacity, forms):
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat:
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(HOME / "docs" / "studies.svg", metadata={"Date": None})


def draw_games() -> None:
    """The score on each game at every evaluation, over all games; the band is when it was learned."""
    import matplotlib.pyplot as plt

    result = load("atari8-short")
    if result is None:
        return
    runs = {name: result["methods"][name] for name in ("agscl", "finetune")}
    learned = min(run["tasks_learned"] for run in runs.values())
    figure, axes = plt.subplots(2, 4, figsize=(10, 4.6), layout="constrained")
    for task, axis in enumerate(axes.flat):
        if task >= learned:
            axis.axis("off")
            continue
        axis.axvspan(task, task + 1, color="C1", alpha=0.15, linewidth=0)
        for number, (name, run) in enumerate(runs.items()):
            seen = [one for one in run["evaluations"] if task <= one["task"] < learned]
            steps = max(one["steps"] for one in seen)
            at = [one["task"] + one["steps"] / steps for one in seen]
            axis.plot(at, [one["scores"][task] for one in seen], f"C{number}", marker=".", label=_title(name))
        axis.set_title(_last_evaluation(runs["agscl"], task)["name"], fontsize=9)
        axis.set_xlim(0, learned)
        axis.set_xticks(range(learned + 1))
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    axes[1, 0].set_xlabel("games learned", fontsize=8)
    axes[0, 0].set_ylabel("score", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, 3].legend(handles, labels, loc="center", frameon=False)
    figure.savefig(HOME / "docs" / "atari8-short.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for name in PAGES:
        page = HOME / name
        text = page.read_text()
        if fill_sections(text) != text:
            stale.append(name)
            if not arguments.check:
                page.write_text(fill_sections(text))
    if arguments.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make docs")
    if not arguments.check:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "agscl"
        draw()
        draw_methods()
        draw_studies()
        draw_games()


if __name__ == "__main__":
    main()
