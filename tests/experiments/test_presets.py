from dataclasses import fields
from pathlib import Path

import pytest

from agscl.experiments.method_entries import METHODS
from agscl.experiments.presets import PRESETS
from agscl.experiments.run_config import configure
from agscl.experiments.studies import STUDIES, plan_study
from agscl.reinforcement import PPOConfig


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


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_and_no_study_sets_what_has_no_effect(preset):
    is_agent = isinstance(PRESETS[preset].training, PPOConfig)
    studies = [name for name in STUDIES if not (name == "aopc" and is_agent)]
    lines = [line for name in studies for line in plan_study(preset, name, 1, Path())]
    configs = [job.config for line in lines for job in line.jobs]
    for config in [*configs, *(configure(preset, method=name) for name in METHODS if METHODS[name].settings)]:
        if METHODS[config.method].settings:
            settings = METHODS[config.method].method_class.Config(**config.settings)
            defaults = {field.name: field.default for field in fields(settings)}
            assert [name for name in settings.find_unused() if getattr(settings, name) != defaults[name]] == []
