from dataclasses import replace

import pytest

from agscl.experiments.run_config import configure
from agscl.experiments.run_environment import choose_threads


def test_changes_are_checked_by_name_and_value():
    config = configure("digits", method="ewc", epochs=3, lam=7.0, patience=2)
    assert (config.training.epochs, config.training.patience, config.settings["lam"]) == (3, 2, 7.0)
    with pytest.raises(ValueError, match=r"ewc has no setting 'mu'. Its settings: batchnorm, clip_penalty_step, lam"):
        configure("digits", method="ewc", mu=3.0)
    with pytest.raises(ValueError, match="lam must be"):
        configure("digits", method="ewc", lam=-1.0)
    with pytest.raises(ValueError, match=r"no method is called 'nosuch'. There are: agscl"):
        configure("digits", method="nosuch")


@pytest.mark.parametrize(
    ("preset", "device", "threads"),
    [("digits", "cpu", 1), ("tinyimagenet32", "cpu", None), ("tinyimagenet32", "cuda:1", 1)],
)
def test_a_run_on_a_gpu_uses_one_cpu_thread_and_others_what_the_preset_says(preset, device, threads):
    config = replace(configure(preset, method="agscl"), device=device)  # which need not be there
    assert choose_threads(config) == threads
