import io

from rich.console import Console

from agscl.cli.data import _find_datasets
from agscl.cli.main import main
from agscl.cli.run_summary import _make_accuracy_matrix, _make_metrics_table
from agscl.experiments.method_entries import METHODS
from agscl.experiments.presets import PRESETS


def test_methods_lists_every_method_with_its_description_and_what_it_stores(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, each in METHODS.items():
        line = next(line for line in lines if line.split()[:1] == [name])
        assert each.about.startswith(line.removeprefix(name).strip()[:30])
    rows = [line.replace("AGS-CL paper", "paper").split() for line in lines if line.endswith(("B", "–"))]
    held = {name: figures for name, *figures in rows}
    assert held["EWC"] == ["8,350", "8,350", "–", "–", "–", "66.8", "kB"]
    assert held["HAT"] == ["–", "–", "150", "750", "–", "3.6", "kB"]
    assert held["fine-tuning"] == ["–"] * 6
    assert held["AGS-CL"][0] == "150"
    assert max(map(len, lines)) <= 80


def test_numbers_too_long_for_the_memory_table_are_shortened():
    from agscl.cli.console import console
    from agscl.cli.memory_table import make_memory_table
    from agscl.methods import find_methods
    from agscl.methods._parts.memory_forecast import Amount, LayerInputs, Outline

    many, layers = Amount(4 * 10**9, 16 * 10**9), (LayerInputs(1, 10**5, (100,), 4),)
    outline = Outline(weights=many, packed=many.numbers, groups=10**5, incoming=many, layers=layers)
    kept = {name: METHODS[name].forecast_memory(outline, 3) for name in find_methods()}
    with console.capture() as captured:
        console.print(make_memory_table("", kept))
    assert "8,000.0 M" in captured.get()
    assert "48.0 GB" in captured.get()
    assert max(map(len, captured.get().splitlines())) <= 80


def test_on_a_narrow_terminal_the_labels_wrap_and_no_figure_is_cut():
    outcome = {"average_accuracy": 0.9, "plasticity": 0.912, "stability": 0.934, "forgetting": 0.056}
    narrow = Console(width=50, file=io.StringIO())
    narrow.print(_make_metrics_table({"finetune": outcome, "agscl": outcome}))
    shown = narrow.file.getvalue()
    for words in ("fine-tuning", "AGS-CL", "0.912", "0.934", "5.6 %"):
        assert words in shown
    assert "…" not in shown


def test_the_title_of_a_narrow_table_is_one_line_where_the_terminal_has_room_for_it():
    table = _make_accuracy_matrix("AGS-CL paper", ["0-1", "2-3"], [[0.9], [0.9, 0.8]])
    title = "AGS-CL paper: accuracy on each task, %"
    for width, count in ((80, 1), (len(title), 1), (30, 2)):
        terminal = Console(width=width, file=io.StringIO())
        terminal.print(table)
        lines = [line.rstrip() for line in terminal.file.getvalue().splitlines()]
        assert " ".join(lines[:count]) == title
        assert lines[count].split() == ["after", "learning", "0-1", "2-3"]


def test_data_list_shows_every_preset_and_data_get_knows_it(capsys):
    assert main(["data", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert set(PRESETS) <= set(names)
    assert _find_datasets(["omniglot5", "omniglot-plain"]) == ["omniglot"]
