"""The page of a run: what it says, what it holds, and what it does with odd input."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vl_convert", reason="pages need the extra report: pip install 'agscl[report]'")

from agscl.certificate import Certificate
from agscl.cli.main import main
from agscl.experiments.certificate_chain import certificate_path
from agscl.experiments.studies import RHOS
from agscl.report import NothingToShow, make_page, read_report, vega
from agscl.report.csv_tables import list_rows
from agscl.report.headline import make_verdict
from agscl.report.page import MAX_BYTES, pack_text
from agscl.report.provenance import add_provenance
from agscl.report.read import read_run
from agscl.runs.run_folder import read_result
from report.small_runs import write_comparison, write_large_run
from run_files import edit_json

HOME = Path(__file__).parents[2]
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages without pictures, which take most of the time to write."""
    monkeypatch.setattr(vega, "make_svg", lambda *_, **__: '<svg width="1" height="1"></svg>')


def read_text(page: str) -> str:
    """The words of a page, without its scripts and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def read_data(page: str) -> dict:
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_the_page_of_a_run_has_all_parts_in_their_order_and_no_network(digits):
    report = read_report([digits])
    add_provenance(report, [digits])
    page = make_page(report)
    names = ("verdict", "matrix", "average", "nodes", "moved", "capacity", "memory", "curves", "provenance")
    found = [page.index(f'<section id="{name}"') for name in names]
    assert found == sorted(found)
    assert len(page.encode()) < 2_000_000
    markup = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=\"(?!#|data:)", markup)
    assert "default-src 'none'" in page
    text = read_text(page)
    assert "proven AGS-CL learned 5 tasks" in text
    assert "agscl run digits --method agscl --seed 0 --set epochs=3 batch_size=64" in text
    assert read_result(digits)["digest"] in text


def test_pictures_and_tables_stand_in_the_page_without_javascript(digits):
    page = make_page(read_report([digits]))
    for name in ("matrix-1", "average", "moved", "capacity", "forecast", "memory", "losses"):
        chart = page.split(f'data-chart="{name}"')[1].split("</figure>")[0]
        assert "<svg" in chart, name
    assert page.count("<table>") >= 8
    assert '<figure id="node-picture" class="static"><svg' in page


def test_the_numbers_of_the_page_are_those_of_the_result(digits):
    result = read_result(digits)["methods"]
    rows = list_rows(read_report([digits]))
    for method, title in (("agscl", "AGS-CL"), ("finetune", "fine-tuning")):
        stored = [value for row in result[method]["accuracies"] for value in row]
        assert [row["accuracy"] for row in rows["accuracies"] if row["method"] == title] == stored
        (metrics,) = [row for row in rows["metrics"] if row["method"] == title]
        for name in ("average_accuracy", "forgetting", "stability", "plasticity"):
            assert metrics[name] == pytest.approx(result[method][name])
    certificates = [Certificate.load(certificate_path(digits, number)) for number in range(1, 6)]
    assert [row["moved"] for row in rows["moved"]] == [len(one.moved) for one in certificates]
    assert [row["kept"] for row in rows["moved"]] == [len(one.held) for one in certificates]
    since = [row["important_since"] for row in rows["nodes"]]
    assert since.count("") == result["agscl"]["statistics"][-1]["free"]


def test_the_node_map_holds_the_importance_of_every_node_after_every_task(digits):
    from agscl.runs import Run

    history = read_report([digits]).detail.nodes
    omega = Run(digits).load_checkpoint()["trainer"]["method"]["knowledge"]["omega"]
    assert history.importance.shape == (5, len(omega))
    assert history.importance[-1].tolist() == omega.tolist()
    for task, importance in enumerate(history.importance):
        assert ((importance > 0) == (history.first <= task)).all()
    nodes = read_data(make_page(read_report([digits])))["nodes"]
    assert [layer["size"] for layer in nodes["layers"]] == [50, 50, 50]
    assert [layer["reads"] for layer in nodes["layers"]] == [[], [0], [1]]
    assert all(nodes["fresh"])


def test_a_task_called_script_is_text_everywhere(tmp_path, without_pictures):
    names = [SCRIPT, "</script><b>bold</b>", "a & b \"quoted\" 'single'", "{{ 7 * 7 }}", "\u2028 line"]
    folder = write_large_run(tmp_path / f"run {SCRIPT.replace('/', '')}", {"fc": 20}, 5, names=names)
    report = read_report([folder])
    add_provenance(report, [folder])
    page = make_page(report)
    assert SCRIPT not in page
    assert "<b>bold" not in page
    assert "</script><b>" not in page
    assert "{{ 7 * 7 }}" in html.unescape(page)
    assert read_data(page)["nodes"]["tasks"] == names


def test_data_within_a_script_element_cannot_end_it():
    text = pack_text("</script><!--<script>\u2028")
    assert re.fullmatch(r"[\w+/=]+", text, re.ASCII)
    assert zlib.decompress(base64.b64decode(text)).decode() == "</script><!--<script>\u2028"


def test_nodes_that_moved_are_counted_by_the_task_that_took_them(tmp_path, without_pictures):
    folder = write_large_run(tmp_path / "run", {"conv": 30, "fc": 100}, 6, moves=True)
    report = read_report([folder])
    assert make_verdict(report).tone == "plain"
    text = read_text(make_page(report))
    moved = sum(len(one.moved) for one in report.detail.certificates)
    assert moved
    assert "Orange cells moved" in text
    assert "moved at least once" in text


def test_the_largest_page_stays_below_the_limit(tmp_path, without_pictures):
    folder = write_large_run(tmp_path / "run", {"wide": 40_000}, 3)
    (folder / "play").mkdir()
    (folder / "play" / "pong.gif").write_bytes(b"GIF89a" + bytes(4_000_000))
    page = make_page(read_report([folder]))
    assert len(page.encode()) <= MAX_BYTES


# What is not as it should be ------------------------------------------------------------------------------------------


def test_an_unfinished_run_says_how_far_it_is(run, without_pictures):
    log = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "result.json").unlink()
    (run / "events.jsonl").write_bytes(b"".join(log[:-9]))
    report = read_report([run])
    text = read_text(make_page(report))
    assert make_verdict(report).tone == "wait"
    assert "not finished" in text
    assert "This run is not finished: task" in text
    assert "So far, AGS-CL has learned 3 of 5 tasks" in text
    [position] = re.findall(r"task 4 of 5 of AGS-CL .*?, (\d+) % of that method's training is done", text)
    assert 60 <= int(position) < 100, "fine-tuning, which was trained first, does not count"
    assert "over 3 tasks so far" in text


def test_a_run_that_has_only_started_gives_a_page_that_says_so(run, without_pictures):
    for path in ("result.json", "events.jsonl"):
        (run / path).unlink()
    for path in [*(run / "certificates").iterdir(), *(run / "nodes").iterdir()]:
        path.unlink()
    text = read_text(make_page(read_report([run])))
    assert "This run is under way: nothing has been measured yet." in text
    assert "has not logged anything yet" in text


def test_a_log_that_is_cut_short_is_read_up_to_there(run, without_pictures):
    log = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(log[: len(log) * 2 // 3] + b"\xff\xfe{")
    report = read_report([run])
    assert any("cut short" in problem for problem in report.problems)
    make_page(report)
    (run / "events.jsonl").write_bytes(log.replace(b'"epoch"', b'"epo', 3))
    assert any("lines of events.jsonl are damaged" in problem for problem in read_report([run]).problems)


@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "environment.json", "events.jsonl", "result.json", "certificates/01.json",
             "certificates/03.json", "nodes/02.json", "checkpoints/000010.json"]
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "list", "nested"])
def test_whatever_file_is_damaged_there_is_a_page_that_is_not_blank(run, without_pictures, name, damage):
    path = run / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        depth = 3000
        path.write_bytes(
            {"empty": b"", "cut": content[: len(content) // 2], "list": b"[]", "nested": b"[" * depth + b"]" * depth}[
                damage
            ]
        )
    report = read_report([run])
    add_provenance(report, [run])
    text = read_text(make_page(report))
    assert "AGS-CL" in text
    if name.startswith(("result", "certificates", "nodes/")) and damage != "missing":
        assert report.problems


def test_a_result_that_was_edited_is_shown_with_a_warning(run, without_pictures):
    text = (run / "result.json").read_text()
    (run / "result.json").write_text(text.replace('"forgetting": 0', '"forgetting": 1', 1))
    report = read_report([run])
    add_provenance(report, [run])
    assert any("does not match its checksum" in problem for problem in report.problems)
    assert make_verdict(report).tone == "bad"


def test_weights_that_are_not_the_certified_ones_are_said_first(run):
    def change(result):
        result["methods"]["agscl"]["weights_sha256"] = "0" * 64

    edit_json(run / "result.json", change)
    report = read_report([run])
    add_provenance(report, [run])
    verdict = make_verdict(report)
    assert (verdict.tone, verdict.badge) == ("bad", "check failed")
    assert verdict.sentence.startswith("According to its files, AGS-CL learned 5 tasks")
    assert "guaranteed" not in " ".join(verdict.details)
    assert "its files do not fit together, so nothing here is proven: " in verdict.details[0]


def test_a_run_whose_weights_could_not_be_checked_is_not_called_proven(run):
    report = read_report([run])
    verdict = make_verdict(report)
    assert (verdict.tone, verdict.badge) == ("plain", "not checked")
    assert "But the stored weights were not checked against the certificates." in verdict.details


def test_a_run_in_which_nodes_moved_once_is_not_called_proven_though_the_last_task_moved_none(run):
    report = read_report([run])
    add_provenance(report, [run])
    assert make_verdict(report).badge == "proven"
    report.detail.certificates[2] = replace(report.detail.certificates[2], moved=[3])
    assert make_verdict(report).badge == "measured"


def test_the_verdict_of_a_method_without_certificates_says_that_nothing_is_proven(tmp_path):
    words = ["run", "digits", "--method", "finetune", "--epochs", "1", "--batch-size", "256", "--name", "plain"]
    assert main([*words, "--runs", str(tmp_path)]) == 0
    report = read_report([tmp_path / "plain"])
    add_provenance(report, [tmp_path / "plain"])
    verdict = make_verdict(report)
    assert verdict.badge == "measured"
    forgetting = read_result(tmp_path / "plain")["methods"]["finetune"]["forgetting"]
    assert forgetting > 0
    assert verdict.sentence.endswith(f"and forgot {100 * forgetting:.1f} %.")
    assert not any("guaranteed" in detail for detail in verdict.details)


def test_a_comparison_says_that_nothing_was_forgotten_only_where_that_is_exact(tmp_path):
    folder = write_comparison(tmp_path / "compared", ["agscl", "finetune"], 2, tasks=3)
    report = read_report([folder])
    assert "forgot nothing" not in make_verdict(report).sentence
    for outcome in report.ranked[0].outcomes:
        outcome.accuracies = [[0.99], [0.99, 0.98], [0.99, 0.98, 0.97]]
    assert make_verdict(report).sentence.endswith(", and forgot nothing.")
    report.ranked[0].outcomes[0].accuracies[2][0] -= 1e-9
    assert "forgot nothing" not in make_verdict(report).sentence


def test_seeds_with_tasks_of_their_own_are_nothing_that_is_missing(tmp_path, without_pictures):
    folder = write_comparison(tmp_path / "compared", ["agscl", "finetune"], 2, tasks=3)
    edit_json(folder / "agscl-seed1" / "result.json", lambda result: result["tasks"].reverse())
    report = read_report([folder])
    assert report.problems == []
    assert "tasks are named by number" in read_text(make_page(report))


def test_a_run_of_an_older_version_without_node_records_says_what_is_missing(run, without_pictures):
    for path in (run / "nodes").iterdir():
        path.unlink()
    (run / "nodes").rmdir()
    report = read_report([run])
    assert any("importance of nodes was not recorded for 5 of 5 tasks" in problem for problem in report.problems)
    assert read_data(make_page(report))["nodes"]["importance"] is None


def test_odd_values_in_a_result_are_no_reason_to_fail(run, without_pictures):
    def change(result):
        result["methods"]["agscl"]["accuracies"] = "none"
        result["methods"]["finetune"] = {"accuracies": [[1.0], [0.5, float("nan")]]}
        result["tasks"] = {"a": 1}

    result = json.loads((run / "result.json").read_text())
    change(result)
    (run / "result.json").write_text(json.dumps(result))
    assert "AGS-CL" in read_text(make_page(read_report([run])))


@pytest.mark.parametrize(
    "damage",
    [
        {"seconds": 5},
        {"tasks": [1, None, {}]},
        {"memory": [1]},
        {"memory": {"bytes": "many"}},
        {"losses": "none"},
        {"losses": [5]},
        {"evaluations": 7},
        {"scores": [[1.0]], "evaluations": [{"task": 0, "scores": ["x", None]}, {"task": "b"}]},
        {"statistics": 3},
        {"statistics": [{"nodes": "many", "free": None, "capacity": {"layers": [{"layer": 1}], "tasks_left": "x"}}]},
        {"statistics": [{"capacity": {"layers": [{"layer": "a", "nodes": 0, "taken": 0, "free": 0}]}}] * 5},
    ],
)
def test_a_result_with_values_of_another_kind_still_has_its_page(run, without_pictures, damage):
    result = json.loads((run / "result.json").read_text())
    for key, value in damage.items():
        (result if key in ("seconds", "tasks") else result["methods"]["agscl"])[key] = value
    (run / "result.json").write_text(json.dumps(result))
    report = read_report([run])
    text = read_text(make_page(report))
    assert "learned 5 tasks to an average" in text
    assert report.problems


def test_a_part_that_cannot_be_made_is_named_once_and_the_others_are_there(digits, without_pictures, monkeypatch):
    monkeypatch.setattr("agscl.report.sections._find_budget", lambda run: {}["budget"])
    report = read_report([digits])
    for _ in range(2):
        text = read_text(make_page(report))
    assert text.count("A part of this page (nodes) is left out") == 1
    assert "Memory between tasks" in text


@pytest.mark.parametrize("name", ["nothing-there", "empty", "notes.json"])
def test_where_there_is_nothing_to_show_the_command_says_so(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.json").write_text('{"a": 1}')
    assert main(["report", name]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert "Traceback" not in message
    with pytest.raises(NothingToShow):
        read_report([tmp_path / name])


# Several runs ---------------------------------------------------------------------------------------------------------


def test_a_comparison_shows_methods_over_seeds_with_bands(tmp_path, without_pictures):
    folder = write_comparison(tmp_path / "compared", ["agscl", "ewc", "finetune"], 3, tasks=4)
    report = read_report([folder])
    assert {line.label: line.seeds for line in report.lines} == {
        title: [0, 1, 2] for title in ("AGS-CL", "EWC", "fine-tuning")
    }
    verdict = make_verdict(report)
    assert "Of 3 methods, AGS-CL has the highest average accuracy over 3 seeds" in verdict.sentence
    data = read_data(make_page(report))
    values = data["charts"]["average"]["data"]["values"]
    assert all(row["low"] < row["mean"] < row["high"] for row in values)
    assert {row["seeds"] for row in values} == {3}


def test_methods_that_learned_fewer_tasks_are_shown_but_not_ranked(tmp_path, without_pictures):
    folder = write_comparison(tmp_path / "compared", ["agscl", "ewc", "finetune"], 1, tasks=4)
    for name, learned in (("agscl-seed0", 1), ("ewc-seed0", 3), ("finetune-seed0", 3)):
        result = json.loads((folder / name / "result.json").read_text())
        rows = result["methods"][name.partition("-")[0]]["accuracies"][:learned]
        (folder / name / "result.json").unlink()
        (folder / name / "data.json").write_text(json.dumps({"tasks": result["tasks"]}))
        events = [
            {"event": "task ended", "method": name.partition("-")[0], "progress": 0.1, "task": task, "accuracies": row}
            for task, row in enumerate(rows)
        ]
        (folder / name / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    report = read_report([folder])
    assert [line.label for line in report.ranked] == ["EWC", "fine-tuning"]  # AGS-CL has the highest average, of one
    verdict = make_verdict(report)
    assert verdict.sentence.startswith("So far, after 3 of 4 tasks: of 2 methods, EWC has the highest average accuracy")
    assert verdict.details[-1] == "Not compared yet, having learned fewer tasks: AGS-CL (after 1 task)."
    page = make_page(report)
    assert "AGS-CL (after 1 task)" in page
    assert "So far" in page


def test_a_bound_is_not_said_to_keep_no_memory(tmp_path, without_pictures):
    folder = write_comparison(tmp_path / "compared", ["agscl", "ewc", "separate"], 1, tasks=3)
    values = read_data(make_page(read_report([folder])))["charts"]["memory"]["data"]["values"]
    assert {row["method"] for row in values if row["kind"] == "measured"} == {"AGS-CL", "EWC"}


def test_several_runs_are_compared_on_one_page(digits, tmp_path, without_pictures):
    other = write_large_run(tmp_path / "made-up", {"fc": 30}, 5)
    report = read_report([digits, other])
    assert report.kind == "runs"
    assert any("fine-tuning" in line.label for line in report.lines)
    make_page(report)


def test_the_command_writes_the_page_figures_and_numbers(digits, tmp_path, capsys):
    words = ["report", str(digits), "--out", str(tmp_path / "a" / "page.html")]
    assert main([*words, "--figures", str(tmp_path / "figures"), "--csv", str(tmp_path / "csv")]) == 0
    assert (tmp_path / "a" / "page.html").stat().st_size > 500_000
    assert "page.html (0." in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"average.svg", "average.png", "matrix-1.svg", "nodes.svg", "nodes.png", "moved.png"} <= names
    assert (tmp_path / "figures" / "nodes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "csv" / "accuracies.csv").read_text().startswith("method,seed,after,task,name,accuracy\n")


def test_every_csv_file_names_the_method_and_the_seed_of_its_rows(digits, tmp_path):
    for name, change in {"a": {}, "b": {"budget": 0.5, "seed": 7}}.items():
        shutil.copytree(digits, tmp_path / name)
        (tmp_path / name / "result.json").unlink()  # which would have to fit
        edit_json(tmp_path / name / "config.json", lambda config, change=change: config["settings"].update(change))
    edit_json(tmp_path / "b" / "config.json", lambda config: config.update(seed=7))
    report = read_report([tmp_path / "a", tmp_path / "b"])
    assert report.detail.path.name == "a"
    report.detail = read_run(tmp_path / "b")  # whose label names its settings
    found = {name: {(row["method"], row["seed"]) for row in rows} for name, rows in list_rows(report).items()}
    assert found["nodes"] == found["moved"] == {("AGS-CL (budget 0.5)", 7)}
    assert found["nodes"] < found["accuracies"] == found["losses"]
    of_one = {name: rows[-1] for name, rows in list_rows(read_report([digits])).items()}
    assert {(row["method"], row["seed"]) for row in of_one.values()} <= {("AGS-CL", 0), ("fine-tuning", 0)}
    assert (of_one["nodes"]["method"], of_one["moved"]["method"]) == ("AGS-CL", "AGS-CL")


def test_names_in_csv_files_are_no_formulas(tmp_path):
    from agscl.report.csv_tables import write_tables

    folder = write_large_run(tmp_path / "run", {"fc": 20}, 2, names=["=1+1", "@x"])
    write_tables(read_report([folder]), tmp_path / "csv")
    text = (tmp_path / "csv" / "accuracies.csv").read_text()
    assert ",'=1+1," in text
    assert ",=1+1," not in text


def test_a_run_ends_with_the_path_of_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGSCL_REPORT", "1")
    monkeypatch.chdir(tmp_path)
    words = ["run", "--epochs", "1", "--batch-size", "256", "--name", "short"]
    assert main(words) == 0
    assert capsys.readouterr().out.rstrip().endswith("page         runs/short/report.html")
    assert (tmp_path / "runs" / "short" / "report.html").exists()


def test_a_page_that_cannot_be_written_does_not_fail_the_run(digits, tmp_path, monkeypatch, capsys):
    from agscl.cli.report import write_page_at_end

    def fail(*_):
        raise RuntimeError("out of ink")

    monkeypatch.setenv("AGSCL_REPORT", "1")
    monkeypatch.setattr("agscl.report.read.read_report", fail)
    write_page_at_end(digits)
    assert "page         not written: out of ink" in capsys.readouterr().out
    monkeypatch.setattr("agscl.report.vega.is_available", lambda: False)
    write_page_at_end(digits)
    assert "pip install 'agscl[report]'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tinyimagenet32", "digits_comparison", "studies/digits-aopc", "studies/digits-rho"])
def test_files_of_results_have_pages_too(name, without_pictures):
    report = read_report([HOME / "results" / f"{name}.json"])
    page = make_page(report)
    assert report.problems == []
    assert len(read_data(page)["charts"]) >= 1
    assert "commit" in read_text(page) or report.kind == "study"


def test_a_study_names_the_papers_form_as_everywhere_else_whatever_its_file_calls_it(tmp_path, without_pictures):
    (study,) = read_report([HOME / "results" / "studies" / "digits-rho.json"]).studies
    labels = [line["label"] for line in study["lines"]]
    assert labels == ["fine-tuning", *[f"AGS-CL paper, ρ {rho:g}" for rho in RHOS], "MAS"]
    for label in ("AGS-CL", "AGS-CL paper"):
        line = {**study["lines"][1], "label": label}
        (tmp_path / "prox.json").write_text(json.dumps({**study, "study": "prox", "lines": [line]}))
        page = read_text(make_page(read_report([tmp_path])))
        assert "studies of the parts of AGS-CL in its paper's form" in page
        assert re.search(r"average accuracy, % .* AGS-CL paper ", page)


def test_agents_have_a_curve_for_each_game_with_the_time_it_was_learned(tmp_path, without_pictures):
    report = read_report([HOME / "results" / "control.json"])
    page = make_page(report)
    charts = read_data(page)["charts"]
    bands = [charts[f"game-{task}"]["layer"][0]["data"]["values"] for task in (1, 2, 3)]
    assert bands == [[{"from": task, "to": task + 1}] for task in range(3)]
    assert "Game by game" in page
    rows = list_rows(report)
    assert rows["evaluations"][0].keys() >= {"method", "seed", "learning", "steps", "task", "score"}
    assert "score" in rows["accuracies"][0]


def test_scores_in_a_heat_map_are_short_enough_for_its_cells_and_whole_in_its_table(tmp_path, without_pictures):
    folder = write_large_run(tmp_path / "run", {"fc": 20}, 3)
    scores = [[1290.0], [949.96, -21.7], [999.6, 9960.0, 2_345_678.0]]
    edit_json(folder / "result.json", lambda result: result["methods"]["agscl"].update(scores=scores))
    page = make_page(read_report([folder]))
    [matrix] = [spec for name, spec in read_data(page)["charts"].items() if name.startswith("matrix")]
    labels = [row["label"] for row in matrix["data"]["values"]]
    assert labels == ["1.3k", "950", "-22", "1.0k", "10k", "2.3M"]
    assert "2345678" in read_text(page)


def test_recorded_play_stands_in_the_page_as_far_as_it_fits(tmp_path, without_pictures):
    folder = write_large_run(tmp_path / "run", {"fc": 20}, 2)

    def give_scores(result):
        result["methods"]["agscl"]["scores"] = [[1.0], [2.0, 3.0]]
        result["methods"]["agscl"]["evaluations"] = [
            {"task": task, "steps": 10, "scores": [1.0] * (task + 1), "relative": [1.0] * (task + 1)}
            for task in range(2)
        ]

    edit_json(folder / "result.json", give_scores)
    (folder / "play" / "agscl").mkdir(parents=True)
    (folder / "play" / "agscl" / "pong <b>.gif").write_bytes(b"GIF89a small")
    (folder / "play" / "large.mp4").write_bytes(bytes(3_000_000))
    page = make_page(read_report([folder]))
    assert 'src="data:image/gif;base64,R0lGODlhIHNtYWxs"' in page
    assert "agscl/pong &lt;b&gt;" in page
    assert "large.mp4" in page
    assert "too large for this page" in page
    assert len(page.encode()) < 2_000_000


def test_a_comparison_ends_with_the_path_of_its_page(tmp_path, monkeypatch, capsys, without_pictures):
    monkeypatch.setenv("AGSCL_REPORT", "1")
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--methods", "agscl", "--seeds", "2", "--jobs", "1", "--epochs", "1", "--batch-size", "256"]
    assert main([*words, "--name", "both"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("page         runs/both/report.html")
    text = read_text((tmp_path / "runs" / "both" / "report.html").read_text())
    assert "agscl compare digits --methods agscl,finetune --seeds 2 --set epochs=1 batch_size=256" in text
    assert "Shown for AGS-CL, seed 0 (agscl-seed0)" in text
    assert not list((tmp_path / "runs" / "both").glob("*/report.html"))


@pytest.mark.parametrize("kind", ["digits", "comparison", "agents", "study", "atari8-short"])
def test_the_docs_have_a_small_page_of_each_kind(kind):
    page = (HOME / "docs" / "pages" / f"{kind}.html").read_text()
    assert len(page.encode()) < (2_000_000 if kind == "atari8-short" else 1_000_000)
    assert read_data(page)["charts"]
    assert ("What is missing" in read_text(page)) == (kind == "atari8-short"), "whose last game is not learned"
    assert page.count('src="data:image/gif;base64,') == {"agents": 3, "atari8-short": 7}.get(kind, 0)
