"""The Trainer of Transformers trains, a method protects: the same bits as in a loop of one's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, EWC, MultiHead
from loops import bits, blobs, mlp, same

pytest.importorskip("transformers", reason="Transformers is not installed: pip install -e '.[transformers]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[transformers]'")

from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from agscl.integrations.transformers import FILE, TransformersCallback

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MultiHead(mlp(), features=32)  # the Trainer counts parameters before any forward pass
        self.task = ""

    def forward(self, x, labels=None):
        logits = self.model(x, self.task)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):
    """Batches in the order of the data, as the loop of one's own has them."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def examples(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for xs, ys in blobs(number) for x, y in zip(xs, ys, strict=True)]


def make_method(model: nn.Module, kind: type = AGSCL) -> AGSCL | EWC:
    return AGSCL(model, torch.zeros(2, 16)) if kind is AGSCL else EWC(model, lam=100.0)


def add_head(net: Net, number: int) -> str:
    torch.manual_seed(number)
    net.task = f"t{number}"
    if net.task not in net.model.heads:
        net.model.add_head(net.task, 3)
    return net.task


def make_trainer(net, method, number, folder, *callbacks, kind=InOrder, **options) -> Trainer:
    defaults = {"per_device_train_batch_size": 12, "num_train_epochs": EPOCHS, "learning_rate": 1e-2}
    defaults |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "adamw_torch", "weight_decay": 0.1}
    defaults |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    defaults |= {"logging_strategy": "no", "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(folder), **{**defaults, **options})
    task = add_head(net, number)
    callbacks = [TransformersCallback(method, task), *callbacks]
    return kind(net, arguments, train_dataset=examples(number), callbacks=callbacks)


def own_loop(kind: type, folder) -> Net:
    net = Net()
    method = make_method(net.model, kind)
    for number in range(2):
        task = add_head(net, number)
        optimizer = make_trainer(net, method, number, folder).create_optimizer()
        data = blobs(number)
        method.begin_task(task, optimizer, epochs=EPOCHS, steps_per_epoch=len(data))
        net.train()
        for _ in range(EPOCHS):
            for x, y in data:
                loss = F.cross_entropy(net.model(x, task), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
    return net


@pytest.mark.parametrize("kind", [AGSCL, EWC])
def test_the_weights_have_the_bits_of_a_loop_of_ones_own(kind, tmp_path):
    expected = own_loop(kind, tmp_path)
    net = Net()
    method = make_method(net.model, kind)
    for number in range(2):
        make_trainer(net, method, number, tmp_path).train()
    assert method.tasks == ["t0", "t1"]
    assert method.task is None
    assert same(bits(net.model), bits(expected.model))


class Stop(TrainerCallback):
    """Ends training as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **given):
        if state.global_step == self.step:
            raise ConnectionError("the machine is gone")


@pytest.mark.parametrize("save_steps", [4, 3], ids=["at the ends of epochs", "within epochs"])
def test_training_resumed_in_the_middle_of_a_task_ends_with_the_same_bits(tmp_path, save_steps):
    expected = own_loop(AGSCL, tmp_path)
    net = Net()
    method = make_method(net.model)
    make_trainer(net, method, 0, tmp_path).train()
    saving = {"save_strategy": "steps", "save_steps": save_steps}
    with pytest.raises(ConnectionError):
        make_trainer(net, method, 1, tmp_path, Stop(14), **saving).train()
    [*_, last] = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert last.name == "checkpoint-12"
    assert torch.load(last / FILE, weights_only=True)["method"]["plan"]["task"] == "t1"

    net = Net()  # as in a new process
    method = make_method(net.model)
    add_head(net, 0)
    make_trainer(net, method, 1, tmp_path, **saving).train(resume_from_checkpoint=True)
    assert method.tasks == ["t0", "t1"]
    assert same(bits(net.model), bits(expected.model))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"optim": "adamw_torch_fused", "bf16": True},
        {"optim": "adafactor"},
        {"max_steps": 18, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    ],
    ids=lambda options: ", ".join(options),
)
def test_old_outputs_keep_their_bits_whatever_the_arguments(options, tmp_path):
    net = Net()
    method = make_method(net.model)
    x = torch.randn(8, 16)
    make_trainer(net, method, 0, tmp_path, kind=Trainer, **options).train()
    before = net.model.eval()(x, "t0")
    make_trainer(net.train(), method, 1, tmp_path, kind=Trainer, **options).train()
    assert torch.equal(net.model.eval()(x, "t0"), before)
    assert method.certificate().kind == "guaranteed"


@pytest.mark.parametrize("best_epoch", [1, 3])
def test_old_outputs_keep_their_bits_where_the_best_weights_are_loaded_at_the_end(best_epoch, tmp_path):
    class Rated(Trainer):
        """The loss of evaluations is best after a given epoch."""

        evaluations = 0

        def evaluation_loop(self, *args, **options):
            output = super().evaluation_loop(*args, **options)
            self.evaluations += 1
            output.metrics["eval_loss"] = abs(self.evaluations - best_epoch)
            return output

    net = Net()
    method = make_method(net.model)
    x, outputs = torch.randn(8, 16), []
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    for number in range(2):
        kind = partial(Rated, eval_dataset=examples(number))
        trainer = make_trainer(net.train(), method, number, tmp_path, kind=kind, save_total_limit=2, **options)
        trainer.train()
        assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{4 * best_epoch}")
        assert all((folder / FILE).exists() for folder in tmp_path.glob("checkpoint-*"))
        outputs.append(net.model.eval()(x, "t0").detach())
    assert torch.equal(*outputs)
    assert method.certificate().kind == "guaranteed"


def test_a_bert_like_model_with_its_own_output_class_is_protected(tmp_path):
    """Attention is no node of AGS-CL's; EWC takes any model. Padding, a dict of inputs, labels of another name."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = BertConfig(
                vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
            )
            self.bert = BertModel(config, add_pooling_layer=False)
            self.heads = nn.ModuleDict()
            self.task = ""

        def forward(self, input_ids, attention_mask=None, labels=None):
            hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
            logits = self.heads[self.task](hidden)
            return SequenceClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)

    draw = torch.Generator().manual_seed(0)
    data = []
    for label in torch.randint(2, (24,), generator=draw):
        words = torch.randint(2, 10, (6,), generator=draw) + 8 * label
        data.append({"input_ids": words, "attention_mask": torch.ones(6, dtype=torch.long), "labels": label})
    net = Classifier()
    method = EWC(net, lam=1e4, heads="heads")
    losses = []
    for task in ("first", "second"):
        net.heads[task] = nn.Linear(16, 2)
        net.task = task
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=6,
            gradient_accumulation_steps=2,
            num_train_epochs=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        old = net.heads["first"].weight.detach().clone()
        Trainer(net, arguments, train_dataset=data, callbacks=[TransformersCallback(method, task)]).train()
        losses.append(float(net.eval()(**{k: torch.stack([one[k] for one in data]) for k in data[0]}).loss))
        net.train()
    assert method.tasks == ["first", "second"]
    assert torch.equal(net.heads["first"].weight, old)
    assert losses[0] < 0.6


class NewOptimizer(TrainerCallback):
    """Makes a new optimizer in the middle of training."""

    trainer: Trainer

    def on_epoch_begin(self, args, state, control, **given):
        if round(state.epoch or 0) == 3:
            self.trainer.optimizer = None
            self.trainer.create_optimizer()
            self.trainer.optimizer = self.trainer.accelerator.prepare(self.trainer.optimizer)
            self.trainer.callback_handler.optimizer = self.trainer.optimizer


def test_a_trainer_that_makes_a_new_optimizer_is_followed(tmp_path):
    net = Net()
    method = make_method(net.model)
    x = torch.randn(8, 16)
    make_trainer(net, method, 0, tmp_path).train()
    before = net.model.eval()(x, "t0")
    net.train()
    renewing = NewOptimizer()
    renewing.trainer = make_trainer(net, method, 1, tmp_path, renewing)
    renewing.trainer.train()
    assert torch.equal(net.model.eval()(x, "t0"), before)
    assert method.certificate().kind == "guaranteed"


def test_training_that_was_interrupted_continues_when_called_again(tmp_path):
    net = Net()
    method = make_method(net.model)
    with pytest.raises(ConnectionError):
        make_trainer(net, method, 0, tmp_path, Stop(5)).train()
    assert method.task == "t0"
    make_trainer(net, method, 0, tmp_path).train()
    assert method.tasks == ["t0"]
    assert method.task is None


def test_what_cannot_work_is_refused_with_the_reason(tmp_path):
    net = Net()
    method = make_method(net.model)
    trainer = make_trainer(net, method, 0, tmp_path)
    del net.model.heads["t0"]
    with pytest.raises(ValueError, match=r"Task 't0' has no head: call model.add_head\('t0'"):
        trainer.train()
    assert method.tasks == []
    with pytest.raises(ValueError, match="made of a MultiHead that is no part of this Net"):
        make_trainer(net, make_method(MultiHead(mlp())), 0, tmp_path).train()
    with pytest.raises(TypeError, match=r"TransformersCallback\(method, …\) needs a method"):
        TransformersCallback(net.model, "t0")
    with pytest.raises(ConnectionError):
        make_trainer(net, method, 0, tmp_path, Stop(6), save_strategy="steps", save_steps=4).train()
    file = tmp_path / "checkpoint-4" / FILE
    state = torch.load(file, weights_only=True)
    torch.save({**state, "task": "other"}, file)
    trainer = make_trainer(net, method, 0, tmp_path)
    with pytest.raises(ValueError, match="a checkpoint of task 'other', not of 't0'"):
        trainer.train(resume_from_checkpoint=True)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"continues at step 4, but .* is missing"):
        trainer.train(resume_from_checkpoint=True)
