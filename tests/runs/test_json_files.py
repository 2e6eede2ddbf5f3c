from agscl.runs.json_files import encode_json


def test_infinite_numbers_become_strings_in_json():
    assert encode_json({"a": [float("inf"), 1.5]}, indent=None) == b'{"a": ["inf", 1.5]}\n'
