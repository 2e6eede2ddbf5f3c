"""Lightning trains, a method protects: the same bits as in a loop of one's own."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agscl import AGSCL, EWC, MultiHead
from loops import bits, blobs, mlp, same

pytest.importorskip("lightning", reason="Lightning is not installed: pip install -c constraints.txt -e '.[lightning]'")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging

from agscl.integrations.lightning import LightningCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS = 6


class Net(pl.LightningModule):
    def __init__(self, *, automatic: bool = True, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MultiHead(mlp())
        self.task = ""
        self.automatic_optimization = automatic
        self.number = optimizers

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x, self.task), y)
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self.model(batch[0], self.task), batch[1]))

    def configure_optimizers(self):
        if self.number == 1:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        parts = self.model.trunk, self.model.heads
        return [torch.optim.AdamW(part.parameters(), lr=1e-2, weight_decay=0.1) for part in parts]


def loader(number: int) -> DataLoader:
    x, y = (torch.cat(part) for part in zip(*blobs(number), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=12)  # Lightning draws from a generator once more than we do


def make_method(model: nn.Module, kind: type = AGSCL) -> AGSCL | EWC:
    return AGSCL(model, torch.zeros(2, 16)) if kind is AGSCL else EWC(model, lam=100.0)


def add_head(net: Net, number: int) -> str:
    torch.manual_seed(number)
    net.task = f"t{number}"
    if net.task not in net.model.heads:
        net.model.add_head(net.task, 3)
    return net.task


def make_trainer(*callbacks: pl.Callback, **options) -> pl.Trainer:
    defaults = {"max_epochs": EPOCHS, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(net: Net, method: AGSCL | EWC, number: int, **options) -> None:
    task = add_head(net, number)
    make_trainer(LightningCallback(method, task), **options).fit(net, loader(number))


def own_loop(kind: type, number_of_tasks: int = 2) -> tuple[Net, AGSCL | EWC]:
    net = Net()
    method = make_method(net.model, kind)
    for number in range(number_of_tasks):
        task = add_head(net, number)
        optimizer, data = net.configure_optimizers(), loader(number)
        method.begin_task(task, optimizer, epochs=EPOCHS, steps_per_epoch=len(data))
        for _ in range(EPOCHS):
            for x, y in data:
                loss = F.cross_entropy(net.model(x, task), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            method.end_epoch()
        method.end_task(data)
    return net, method


@pytest.mark.parametrize("kind", [AGSCL, EWC])
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_the_weights_have_the_bits_of_a_loop_of_ones_own(kind, automatic):
    expected, known = own_loop(kind)
    net = Net(automatic=automatic)
    method = make_method(net.model, kind)
    for number in range(2):
        fit(net, method, number)
    assert same(bits(net.model), bits(expected.model))
    assert method.tasks == known.tasks == ["t0", "t1"]
    assert method.task is None
    assert all(p.requires_grad for p in net.parameters())


class Stop(pl.Callback):
    """Ends a fit as a crash does."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            raise ConnectionError("the machine is gone")


@pytest.mark.parametrize("when", ["end of the epoch", "after validation"])
def test_a_fit_resumed_in_the_middle_of_a_task_ends_with_the_same_bits(tmp_path, when):
    expected, _ = own_loop(AGSCL)
    net = Net()
    method = make_method(net.model)
    fit(net, method, 0)
    task = add_head(net, 1)
    at_end = when == "end of the epoch"
    saving = ModelCheckpoint(tmp_path, save_on_train_epoch_end=at_end, save_last=True, monitor=None)
    stopped = make_trainer(LightningCallback(method, task), saving, Stop(3), enable_checkpointing=True)
    with pytest.raises(ConnectionError):
        stopped.fit(net, loader(1), None if at_end else loader(1))

    net = Net()  # as in a new process
    method = make_method(net.model)
    add_head(net, 0)
    add_head(net, 1)
    callback = LightningCallback(method, task)
    trainer = make_trainer(callback)
    trainer.fit(net, loader(1), None if at_end else loader(1), ckpt_path=tmp_path / "last.ckpt")
    assert callback._epochs_ended == EPOCHS
    assert method.tasks == ["t0", "t1"]
    assert same(bits(net.model), bits(expected.model))


def test_a_checkpoint_in_which_all_epochs_are_done_still_ends_its_task(tmp_path):
    expected, _ = own_loop(AGSCL, 1)
    net = Net()
    method = make_method(net.model)
    task = add_head(net, 0)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    make_trainer(LightningCallback(method, task), saving, enable_checkpointing=True).fit(net, loader(0))
    net = Net()
    method = make_method(net.model)
    add_head(net, 0)
    make_trainer(LightningCallback(method, task)).fit(net, loader(0), ckpt_path=tmp_path / "last.ckpt")
    assert method.task is None
    assert same(bits(net.model), bits(expected.model))


def test_a_checkpoint_holds_the_state_of_the_method_under_the_task(tmp_path):
    net = Net()
    method = make_method(net.model)
    task = add_head(net, 0)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    callback = LightningCallback(method, task)
    make_trainer(callback, saving, enable_checkpointing=True).fit(net, loader(0))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert callback.state_key in saved
    assert "t0" in callback.state_key
    assert saved[callback.state_key]["method"]["plan"]["task"] == "t0"


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"max_epochs": -1, "max_steps": 20},
        {"limit_train_batches": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_old_outputs_keep_their_bits_whatever_the_trainer_does(options):
    net = Net()
    method = make_method(net.model)
    x = torch.randn(8, 16)
    fit(net, method, 0, **options)
    before = net.model.eval()(x, "t0")
    fit(net.train(), method, 1, **options)
    assert torch.equal(net.model.eval()(x, "t0"), before)
    assert "NOT GUARANTEED" not in str(method.certificate())
    assert method.certificate().kind == "guaranteed"


@pytest.mark.parametrize("what", ["early stopping", "averaged weights", "a schedule per step"])
def test_old_outputs_keep_their_bits_whatever_other_callbacks_do(what):
    class Validated(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            if what != "a schedule per step":
                return optimizer
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4 * 20)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def validation_step(self, batch, batch_idx):
            self.log("valid", F.cross_entropy(self.model(batch[0], self.task), batch[1]))

    net = Validated()
    method = make_method(net.model)
    x, outputs = torch.randn(8, 16), []
    for number in range(2):
        others = {
            "early stopping": [EarlyStopping("valid", min_delta=0.1, patience=1)],
            "averaged weights": [StochasticWeightAveraging(1e-2, swa_epoch_start=10)],
        }.get(what, [])
        task = add_head(net.train(), number)
        trainer = make_trainer(LightningCallback(method, task), *others, max_epochs=20)
        trainer.fit(net, loader(number), loader(number))
        assert (trainer.current_epoch < 20) == (what == "early stopping")
        outputs.append(net.model.eval()(x, "t0").detach())
    assert torch.equal(*outputs)
    assert method.certificate().kind == "guaranteed"


class Resumable:
    """A loader that knows which batch comes next, as Lightning asks for to resume within an epoch."""

    def __init__(self, number: int) -> None:
        self.batches, self.position = blobs(number), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        self.position %= len(self.batches)  # Lightning does not ask for the end of an epoch
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StopWithin(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 4 * 2 + 3:
            raise ConnectionError("the machine is gone")


@pytest.mark.parametrize("resumable", [True, False])
def test_a_fit_resumed_within_an_epoch_has_the_same_bits_or_is_warned_of(tmp_path, resumable):
    expected, _ = own_loop(AGSCL, 1)
    make_loader = Resumable if resumable else loader
    task = "t0"
    for stopped in (True, False):
        net = Net()
        method = make_method(net.model)
        add_head(net, 0)
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
        callbacks = [LightningCallback(method, task), *([saving, StopWithin()] if stopped else [])]
        trainer = make_trainer(*callbacks, enable_checkpointing=stopped)
        if stopped:
            with pytest.raises(ConnectionError):
                trainer.fit(net, make_loader(0))
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(net, make_loader(0), ckpt_path=tmp_path / "last.ckpt")
    warned = any("ended before the epoch ended and your dataloader is not resumable" in str(w.message) for w in caught)
    assert warned != resumable
    assert method.tasks == ["t0"]
    if resumable:
        assert same(bits(net.model), bits(expected.model))


def test_several_optimizers_are_all_hooked():
    net = Net(automatic=False, optimizers=2)
    method = make_method(net.model)
    x = torch.randn(8, 16)
    fit(net, method, 0)
    before = net.model.eval()(x, "t0"), bits(net.model)
    fit(net.train(), method, 1)
    assert torch.equal(net.model.eval()(x, "t0"), before[0])
    assert not torch.equal(net.model.trunk[0].weight, before[1]["trunk.0.weight"])


class NewOptimizer(pl.Callback):
    """Makes a new optimizer in the middle of a fit."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 3:
            trainer.strategy.setup_optimizers(trainer)


def test_an_optimizer_made_anew_within_a_fit_is_followed():
    net = Net()
    method = make_method(net.model)
    x = torch.randn(8, 16)
    fit(net, method, 0)
    before = net.model.eval()(x, "t0"), bits(net.model)
    net.train()
    task = add_head(net, 1)
    make_trainer(LightningCallback(method, task), NewOptimizer()).fit(net, loader(1))
    assert torch.equal(net.model.eval()(x, "t0"), before[0])
    assert not same(bits(net.model.trunk), {k[6:]: v for k, v in before[1].items() if k.startswith("trunk")})


def test_a_fit_that_was_interrupted_continues_when_called_again():
    net = Net()
    method = make_method(net.model)
    task = add_head(net, 0)
    with pytest.raises(ConnectionError):
        make_trainer(LightningCallback(method, task), Stop(2)).fit(net, loader(0))
    assert method.task == "t0"
    fit(net, method, 0)
    assert method.tasks == ["t0"]
    assert method.task is None


def test_batches_of_another_form_need_a_function_that_runs_the_model():
    class Named(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    net = Named()
    method = make_method(net.model)
    task = add_head(net, 0)
    data = DataLoader([{"x": x, "y": y} for x, y in blobs(0)], batch_size=None)
    make_trainer(LightningCallback(method, task, forward=lambda batch: net.model(batch["x"], task))).fit(net, data)
    assert method.tasks == ["t0"]
    assert method.task is None


def test_what_cannot_work_is_refused_with_the_reason():
    net = Net()
    method = make_method(net.model)
    with pytest.raises(ValueError, match=r"Task 'new' has no head: call model.add_head\('new'"):
        make_trainer(LightningCallback(method, "new")).fit(net, loader(0))
    assert method.tasks == []
    add_head(net, 0)
    with pytest.raises(ValueError, match="made of a MultiHead that is no part of this Net"):
        make_trainer(LightningCallback(make_method(MultiHead(mlp())), "t0")).fit(net, loader(0))
    with pytest.raises(TypeError, match=r"LightningCallback\(method, …\) needs a method"):
        LightningCallback(net.model, "t0")
    with pytest.raises(ValueError, match="Linear is not a MultiHead"):
        LightningCallback(EWC(nn.Linear(16, 3), lam=1.0), "t0")


@pytest.mark.slow
def test_two_processes_end_with_one_head_that_was_added_after_the_model_was_wrapped(tmp_path):
    script = Path(__file__).with_name("lightning_ddp.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["world_size"] == 2
    assert ranks[0]["added_after_wrapping"] is True
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    for rank in ranks:
        assert torch.equal(rank["before"], rank["after"]), "old outputs keep their bits"
        assert rank["kind"] == "guaranteed"
        assert rank["loss"] < 0.5


def test_nothing_is_warned_of_in_a_plain_fit():
    net = Net()
    method = make_method(net.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(net, method, 0, max_epochs=12)
    assert not [str(one.message) for one in caught if type(one.message).__module__.startswith("agscl")]
