import pytest

from agscl.experiments.config import configure
from agscl.experiments.methods import METHODS
from agscl.experiments.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", METHODS)
def test_every_preset_has_settings_that_every_method_takes(preset, name):
    config = configure(preset, method=name, seed=3)
    assert config.training == PRESETS[preset].training
    assert config.settings.get("seed", 3) == 3


def test_omniglots_settings_are_the_form_behind_the_papers_table():
    settings = PRESETS["omniglot5"].methods
    for name in ("ewc", "si", "rwalk", "mas", "hat"):
        paper = dict(METHODS[name].method_class.paper)
        assert {key: settings[name][key] for key in paper} == paper
        assert set(settings[name]) - set(paper) <= {"lam", "c"}
