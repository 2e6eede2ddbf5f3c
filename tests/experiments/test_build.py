import pytest
import torch

from agscl.experiments.build import build_trainer
from agscl.experiments.run_config import configure
from agscl.runs import WrongOptions
from agscl.tasks import Task


def test_a_task_whose_inputs_have_the_wrong_shape_for_the_network_is_named_before_training():
    config = configure("tinyimagenet32", method="finetune")
    y = torch.tensor([0, 1])

    def task(name, *shape):
        x = torch.zeros(2, *shape)
        return Task(name, 2, x, y, x, y, x, y)

    build_trainer(config, "finetune", (task("a", 3, 32, 32), task("b", 3, 32, 32)))
    with pytest.raises(WrongOptions, match=r"expects inputs of 3 × 32 × 32, .*task 'b' .* are 1 × 28 × 28"):
        build_trainer(config, "finetune", (task("a", 3, 32, 32), task("b", 1, 28, 28)))
