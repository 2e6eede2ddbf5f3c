from agscl.runs.events import read_events


def test_an_incomplete_last_line_of_a_log_is_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    assert list(read_events(path)) == [{"n": 1}]


def test_damaged_lines_of_a_log_are_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 1}\n{"n": \n[3]\n{"n": 4}\n{"n": 5}')
    assert [event["n"] for event in read_events(path)] == [1, 4]
