"""`freeze`: parts of tensors keep their bits in any loop."""

from __future__ import annotations

import copy
import gc
import io
import os
import socket
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agscl
from agscl import AGSCL, WSN, MultiHead, PackNet, freezing
from agscl.freezing import FreezeCertificate
from loops import adam, learn, leave_process_group, make, mlp


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def batch(number: int = 0, inputs: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(16, inputs, generator=draw), torch.randint(3, (16,), generator=draw)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, first: int = 0) -> None:
    for step in range(first, first + steps):
        x, y = batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def check_rows(before: torch.Tensor, after: torch.Tensor, rows: list[int]) -> None:
    """These rows have the same bits, and all others have changed."""
    same = [row for row in range(len(before)) if torch.equal(before[row], after[row])]
    assert same == rows


OPTIMIZERS = {
    "adamw with weight decay": decaying,
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5, fused=True),
    "sgd with momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.05, centered=True, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, weight_decay=0.1),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05, weight_decay=0.1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.05),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.05, weight_decay=0.1),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=5),
    "lbfgs with line search": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=5, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "with moments gathered before"])
def test_frozen_rows_and_columns_keep_their_bits_and_the_others_are_trained(kind, late):
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    if late:
        train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    frozen = agscl.freeze(model[0], rows=[1, 4]), agscl.freeze(model[2], columns=slice(0, 2))
    train(model, optimizer, first=10)
    after = model.state_dict()
    check_rows(before["0.weight"], after["0.weight"], [1, 4])
    check_rows(before["0.bias"], after["0.bias"], [1, 4])
    check_rows(before["2.weight"].T, after["2.weight"].T, [0, 1])
    assert all(each.verify().ok for each in frozen)


@pytest.mark.parametrize("kind", ["adamw with weight decay", "adamw foreach", "sgd with momentum", "rmsprop"])
def test_the_other_rows_are_trained_as_if_nothing_were_frozen(kind):
    """In one linear layer with a loss per row, rows do not depend on each other."""
    weights = []
    for freezing_rows in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 6)
        optimizer = OPTIMIZERS[kind](model)
        if freezing_rows:
            agscl.freeze(model, rows=[0, 2])
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step)[0]).square().mean().backward()
            optimizer.step()
        weights.append(model.weight.detach())
    check_rows(*weights, [1, 3, 4, 5])


def test_frozen_entries_count_neither_for_clipping_nor_for_a_line_search():
    model = network()
    agscl.freeze(model[0], rows=slice(0, 3))
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    assert not model[0].weight.grad[:3].any()
    assert model[0].weight.grad[3:].any()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    seen = []

    def closure():
        seen.append(model[0].weight[:3].detach().clone())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(seen) > 2
    assert all(torch.equal(weights, seen[0]) for weights in seen), "they stay within a step too"


def test_a_block_is_the_rows_within_the_columns_and_leaves_the_bias_alone():
    model = network()
    before = model[0].weight.detach().clone()
    bias = model[0].bias.detach().clone()
    frozen = agscl.freeze(model[0], rows=[0, 5], columns=[2, 3, 7])
    train(model, decaying(model))
    kept = torch.eq(before, model[0].weight)
    expected = torch.zeros(6, 8, dtype=torch.bool)
    expected[[[0], [5]], [2, 3, 7]] = True
    assert torch.equal(kept, expected)
    assert not torch.eq(bias, model[0].bias).any()
    assert str(frozen.verify()) == "2 rows of weight in 3 columns kept every bit"


def test_accumulation_clipping_amp_with_overflow_and_a_scheduler_keep_bits():
    model = network()
    before = copy.deepcopy(model.state_dict())
    frozen = agscl.freeze(model[0], rows=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # the first steps overflow
    for step in range(12):
        x, y = batch(step)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
    assert scaler.get_scale() < 2.0**20
    train(model, optimizer)
    check_rows(before["0.weight"], model[0].weight, [0])
    assert frozen.verify().ok


def test_several_optimizers_may_step_between_a_forward_pass_and_its_backward():
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), network()
    before = generator.weight.detach().clone()
    agscl.freeze(generator, rows=[3])
    optimizers = decaying(generator), decaying(critic)
    for _ in range(3):
        made = generator(torch.randn(16, 4))
        critic(made.detach()).sum().backward()
        optimizers[1].step()
        made.square().sum().backward()
        optimizers[0].step()
    check_rows(before, generator.weight, [3])


def test_an_optimizer_made_later_and_a_group_added_later_are_noticed():
    model = network()
    frozen = agscl.freeze(model[2], rows=[2])
    before = model[2].weight.detach().clone()
    optimizer = decaying(model[0])
    assert "no optimizer that holds them has stepped" in str(frozen.verify())
    train(model, optimizer)
    assert "no optimizer that holds them has stepped" in str(frozen.verify())
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    train(model, optimizer)
    check_rows(before, model[2].weight, [2])
    assert str(frozen.verify()) == "1 row of weight, 1 row of bias kept every bit"


def test_a_resumed_loop_ends_with_the_bits_of_one_that_was_never_stopped():
    whole = network()
    frozen = agscl.freeze(whole[0], rows=[1])
    optimizer = decaying(whole)
    train(whole, optimizer, 3)
    saved = copy.deepcopy([whole.state_dict(), optimizer.state_dict(), frozen.state_dict()])
    train(whole, optimizer, 3, first=3)

    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model.load_state_dict(saved[0])
    again = agscl.freeze(model[0], rows=[5])
    optimizer = decaying(model)
    optimizer.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    train(model, optimizer, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))
    assert again.state_dict()["weight"]["rows"].tolist() == [1]


def test_a_deep_copy_and_a_pickle_of_a_frozen_module_are_frozen_too():
    model = network()
    agscl.freeze(model[0], rows=[0, 5])
    before = model[0].weight.detach().clone()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        train(other, decaying(other))
        check_rows(before, other[0].weight, [0, 5])
        other.zero_grad()
        other(batch()[0]).sum().backward()
        assert not other[0].weight.grad[0].any()
    assert torch.equal(before, model[0].weight)


def test_averaged_weights_keep_the_frozen_bits():
    model = network()
    before = model[0].weight.detach().clone()
    agscl.freeze(model[0], rows=[0, 5])
    averaged = torch.optim.swa_utils.AveragedModel(
        model,
        avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new,  # which rounds
    )
    optimizer = decaying(model)
    for step in range(20):
        train(model, optimizer, 1, first=step)
        averaged.update_parameters(model)
    optimizer.step()
    check_rows(before, averaged.module[0].weight, [0, 5])


def test_weights_written_by_hand_are_found_and_put_back():
    model = network()
    frozen = agscl.freeze(model[0], rows=[1, 4])
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[4, 2] += 1
    report = frozen.verify()
    assert not report.ok
    assert report.moved == {"weight": [4]}
    words = "CHANGED although frozen: row 4 of weight; 1 row of weight, 2 rows of bias kept every bit"
    assert str(report).startswith(words)
    frozen.restore()
    assert frozen.verify().ok
    assert torch.equal(before, model[0].weight)


def test_a_report_says_in_words_what_changed():
    def describe(target, positions, **which):
        frozen = agscl.freeze(target, **which)
        with torch.no_grad():
            (target if isinstance(target, nn.Parameter) else target.weight)[positions] += 1
        return str(frozen.verify()).split(";")[0]

    assert describe(nn.Linear(3, 4), 0) == "CHANGED although frozen: row 0 of weight"
    assert describe(nn.Linear(3, 4), [1, 2], rows=[1, 2, 3]) == "CHANGED although frozen: 2 rows of weight (1, 2)"
    columns = describe(nn.Linear(3, 4), (slice(None), 2), columns=[0, 2])
    assert columns == "CHANGED although frozen: column 2 of weight"
    many = describe(nn.Parameter(torch.zeros(20)), slice(None), rows=slice(0, 12))
    assert many == "CHANGED although frozen: 12 rows of parameter (0, 1, 2, 3, 4, 5, 6, 7, …)"


def test_a_certificate_is_shown_in_a_line_however_much_it_holds():
    frozen = agscl.freeze(nn.Embedding(3000, 4), rows=slice(0, 2000))
    assert repr(frozen.certificate()) == "<FreezeCertificate of 2000 rows of weight>"
    assert str(frozen.certificate()) == "frozen: 2000 rows of weight, with a digest of each row"
    deep = agscl.freeze(nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])).certificate()
    assert repr(deep) == "<FreezeCertificate of 0.weight, 0.bias, 1.weight, 1.bias, 14 other tensors>"


def test_rows_keep_their_bits_where_gradients_live_in_tensors_that_are_never_replaced():
    """As under CUDA graphs: backward adds to fixed gradients, which are zeroed in place."""
    model = network()
    optimizer = decaying(model)
    fixed = {}
    for parameter in model.parameters():
        parameter.grad = fixed[parameter] = torch.zeros_like(parameter)
    frozen = agscl.freeze(model[0], rows=[1, 4])
    before = model[0].weight.detach().clone()
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        assert all(parameter.grad is gradient for parameter, gradient in fixed.items())
        assert not fixed[model[0].weight][[1, 4]].any()
        optimizer.step()
    check_rows(before, model[0].weight, [1, 4])
    assert frozen.verify().ok


def _freeze_on_rank(rank: int, port: int, folder: str, late: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):  # the same on both ranks
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    before = copy.deepcopy(model.state_dict())
    frozen = None if late else (agscl.freeze(model[0], rows=[0, 5]), agscl.freeze(model[1], rows=[0, 5]))
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=late)
    if frozen is None:
        frozen = (agscl.freeze(model[0], rows=[0, 5]), agscl.freeze(model[1], rows=[0, 5]))
    optimizer = decaying(model)
    for step in range(5):
        x, y = batch(2 * step + rank)  # other data on each rank
        optimizer.zero_grad(set_to_none=not late)
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    found = {"before": before, "after": model.state_dict(), "ok": all(one.verify().ok for one in frozen)}
    torch.save(found, f"{folder}/{rank}.pt")
    leave_process_group()


@pytest.mark.parametrize("late", [False, True], ids=["frozen, then wrapped", "wrapped, then frozen"])
def test_rows_keep_their_bits_on_both_ranks_of_distributed_data_parallel(tmp_path, late):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_freeze_on_rank, args=(port, str(tmp_path), late), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["ok"]
    assert second["ok"]
    for found in (first, second):
        for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
            check_rows(found["before"][name], found["after"][name], [0, 5])
    for name in ("0.weight", "0.bias", "1.weight", "3.weight"):
        assert torch.equal(first["after"][name], second["after"][name])


def test_zeros_of_both_signs_and_nan_are_told_apart_bit_for_bit():
    parameter = nn.Parameter(torch.tensor([-0.0, float("nan"), 1.0]))
    frozen = agscl.freeze(parameter, rows=[0, 1])
    parameter.data[0] = 0.0
    assert frozen.verify().moved == {"parameter": [0]}
    frozen.restore()
    assert frozen.verify().ok
    assert torch.signbit(parameter[0])


@pytest.mark.parametrize("assign", [False, True])
def test_loading_other_weights_keeps_the_frozen_ones_with_a_warning(assign):
    model, other = network(), network()
    before = model[0].weight.detach().clone()
    frozen = agscl.freeze(model[0], rows=[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    train(other, decaying(other))
    with pytest.warns(UserWarning, match="differ from the frozen ones in weight, bias"):
        model.load_state_dict(other.state_dict(), assign=assign)
    check_rows(before, model[0].weight, [2])
    train(model, decaying(model))
    check_rows(before, model[0].weight, [2])
    assert not model[0].weight.grad[2].any()
    assert frozen.verify().ok


def test_what_is_frozen_stays_frozen_when_the_result_is_dropped_and_goes_with_the_model():
    gc.collect()
    number = len(freezing._live)
    model, parameter = network(), nn.Parameter(torch.ones(3))
    agscl.freeze(model[0], rows=[0])
    agscl.freeze(parameter, rows=[0])
    gc.collect()
    before = model[0].weight.detach().clone()
    train(model, decaying(model))
    check_rows(before, model[0].weight, [0])
    assert len(freezing._live) == number + 2
    alive = weakref.ref(model)
    del model, parameter
    gc.collect()
    assert alive() is None
    assert len(freezing._live) == number


def test_closed_entries_are_trained_again_and_no_hook_is_left():
    model = network()
    with agscl.freeze(model[0], rows=[0]) as frozen:
        train(model, decaying(model))
        assert frozen.verify().ok
    assert not model[0]._load_state_dict_post_hooks
    assert not model[0].weight._backward_hooks
    before = model[0].weight.detach().clone()
    train(model, decaying(model))
    check_rows(before, model[0].weight, [])
    assert frozen.verify().moved == {"weight": [0], "bias": [0]}


def test_a_whole_module_with_batchnorm_keeps_its_outputs_in_training_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[:3](batch()[0])
    frozen = agscl.freeze(model[:3])
    x = torch.randn(5, 8)
    before = model[:3](x), copy.deepcopy(model.state_dict())
    train(model, decaying(model))
    assert torch.equal(model[:3](x), before[0])
    assert not torch.equal(model[3].weight, before[1]["3.weight"])
    assert str(frozen.verify()) == "0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean, 1.running_var kept every bit"
    frozen.close()
    model[:3](batch(5)[0])
    assert "1.running_mean" in frozen.verify().moved


def test_channels_of_a_batchnorm_keep_scale_shift_and_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(4, 3, 6, 6)
    model(x)
    rows = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool)
    frozen = agscl.freeze(model[0], rows=rows), agscl.freeze(model[1], rows=rows)
    before = model[:2].eval()(x)
    model.train()
    optimizer = decaying(model)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3, 6, 6)), torch.tensor([0, 1, 2, step])).backward()
        optimizer.step()
    after = model[:2].eval()(x)
    assert [channel for channel in range(6) if torch.equal(before[:, channel], after[:, channel])] == [0, 3, 5]
    assert all(each.verify().ok for each in frozen)
    other = copy.deepcopy(model).train()
    other(torch.randn(4, 3, 6, 6))
    assert torch.equal(other[1].running_mean[rows], model[1].running_mean[rows])
    assert not torch.equal(other[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize("sparse", [False, True])
def test_old_tokens_of_an_embedding_stay_while_new_ones_are_trained(sparse):
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=sparse)
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(embedding.parameters(), lr=0.1)
    tokens = torch.tensor([0, 3, 7, 8, 9])
    embedding(tokens).square().sum().backward()
    optimizer.step()
    before = embedding.weight.detach().clone()
    agscl.freeze(embedding, rows=range(7))
    agscl.freeze(embedding, rows=[9], columns=[0])
    for _ in range(3):
        optimizer.zero_grad()
        embedding(tokens).square().sum().backward()
        optimizer.step()
    moved = embedding.weight != before
    assert not moved[:7].any()
    assert moved[7:9].all()
    assert moved[9].tolist() == [False, True, True, True]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_and_a_compiled_step_keep_bits(backend):
    model = network()
    before = model[0].weight.detach().clone()
    compiled = torch.compile(model, backend=backend)
    compiled(batch()[0])
    frozen = agscl.freeze(model[0], rows=[0, 3])
    optimizer = decaying(model)
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(3):
        optimizer.zero_grad()
        x, y = batch(number)
        F.cross_entropy(compiled(x), y).backward()
        step()
    assert agscl.freeze(compiled).verify().ok
    check_rows(before, model[0].weight, [0, 3])
    assert frozen.verify().ok


def test_a_model_moved_to_another_dtype_keeps_the_rounded_values():
    model = network()
    frozen = agscl.freeze(model[0], rows=[0])
    before = model[0].weight.detach().clone()
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    x, y = batch()
    F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    optimizer.step()
    assert torch.equal(model[0].weight[0], before[0].bfloat16())
    assert frozen.verify().ok
    model.float()
    frozen.restore()
    assert torch.equal(model[0].weight[0], before[0])


@pytest.mark.parametrize("kind", [AGSCL, PackNet])
def test_a_method_that_prunes_refuses_weights_that_are_frozen_by_hand(kind):
    torch.manual_seed(0)
    model = MultiHead(mlp())
    frozen = agscl.freeze(model.trunk[0], rows=slice(0, 20))
    method, optimizer = make(kind, model), adam(model)
    model.add_head("t0", 3)
    with pytest.raises(ValueError, match=r"holds entries of trunk\.0\.weight and 1 more, and .* prunes weights"):
        method.begin_task("t0", optimizer, epochs=3)
    frozen.close()
    method.begin_task("t0", optimizer, epochs=3)


def test_rows_frozen_by_hand_stay_beside_a_method_that_does_not_prune():
    torch.manual_seed(0)
    model = MultiHead(mlp())
    frozen = agscl.freeze(model.trunk[0], rows=slice(0, 20))
    before = model.trunk[0].weight.detach().clone()
    learn(make(WSN, model), adam(model), 0)
    check_rows(before, model.trunk[0].weight, list(range(20)))
    assert frozen.verify().ok


# The certificate ------------------------------------------------------------------------------------------------------


def test_a_certificate_is_checked_later_with_the_tensors_alone(tmp_path):
    model = network()
    agscl.freeze(model[0], rows=[1, 4]).certificate().save(tmp_path / "frozen.json")
    train(model, decaying(model))
    certificate = FreezeCertificate.load(tmp_path / "frozen.json")
    assert certificate.check(model.state_dict(), prefix="0.").ok
    tensors = copy.deepcopy(model.state_dict())
    tensors["0.weight"][1, 0] += 1
    tensors["0.weight"][2] += 1
    assert certificate.check(tensors, prefix="0.").moved == {"weight": [1]}
    with pytest.raises(ValueError, match="There is no 'weight'"):
        certificate.check(tensors)
    with pytest.raises(ValueError, match="of another network"):
        certificate.check({"weight": torch.zeros(7, 8)})
    (tmp_path / "frozen.json").write_text("{}")
    with pytest.raises(ValueError, match="not a certificate of the format"):
        FreezeCertificate.load(tmp_path / "frozen.json")
    (tmp_path / "frozen.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        FreezeCertificate.load(tmp_path / "frozen.json")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_check_of_tensors_in_another_dtype_names_the_dtypes_and_not_changed_rows(dtype):
    model = network()
    frozen = agscl.freeze(model[0], rows=[1, 4])
    certificate = frozen.certificate()
    model.to(dtype)
    assert frozen.verify().ok
    with pytest.raises(ValueError, match=r"0\.weight is of dtype float\d+, and float32 when .* Convert to float32"):
        certificate.check(model.state_dict(), prefix="0.")
    assert certificate.check(model.float().state_dict(), prefix="0.").ok is (dtype == torch.float64)


# Which rows -----------------------------------------------------------------------------------------------------------

SIZE = 7
positions = st.lists(st.integers(-SIZE, SIZE - 1), min_size=1, max_size=10)
masks = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).filter(any)
bounds = st.none() | st.integers(-9, 9)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3) | st.integers(-3, -1))
numbers = st.integers(-SIZE, SIZE - 1)
forms = st.one_of(
    slices.filter(lambda some: range(SIZE)[some]),
    numbers,
    *[st.builds(kind, positions) for kind in (list, tuple, set, np.array, torch.tensor)],
    *[st.builds(kind, masks) for kind in (list, tuple, np.array, torch.tensor)],
)


@settings(max_examples=150, deadline=None)
@given(which=forms, dimension=st.sampled_from([0, 1]))
def test_an_index_selects_what_numpy_selects_and_that_alone_is_frozen(which, dimension):
    values = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE) + 1
    parameter = nn.Parameter(values.clone())
    known = list(which) if isinstance(which, tuple | set) else which
    known = known.numpy() if isinstance(known, torch.Tensor) else known
    expected = np.zeros(SIZE, dtype=bool)
    expected[known] = True
    frozen = agscl.freeze(parameter, **{("rows", "columns")[dimension]: which})
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.1)
    parameter.sum().backward()
    optimizer.step()
    kept = (parameter == values).all(1 - dimension)
    frozen.close()
    assert np.array_equal(kept.numpy(), expected)
    assert not (parameter == values).any(1 - dimension)[~kept].any()


# Bad input ------------------------------------------------------------------------------------------------------------

LAYER = nn.Linear(4, 3)
QUANTISED = nn.Parameter(torch.zeros(3, 4, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        (LAYER, {"rows": [0, 3]}, IndexError, "weight has 3 rows, from 0 to 2; got 3"),
        (LAYER, {"columns": -5}, IndexError, "weight has 4 columns, from 0 to 3; got -5"),
        (LAYER, {"rows": [True, False]}, ValueError, "has 3 rows, but the mask has 2 truth values"),
        (LAYER, {"rows": []}, ValueError, "Nothing to freeze: rows selects none of the 3 rows of weight"),
        (LAYER, {"rows": slice(3, 9)}, ValueError, "Nothing to freeze"),
        (LAYER, {"columns": [False] * 4}, ValueError, "Nothing to freeze"),
        (LAYER, {"rows": [0.5]}, TypeError, "rows must be positions, a slice, or a mask of 3 truth values, got a list"),
        (LAYER, {"rows": "all"}, TypeError, "got 'all'"),
        (LAYER, {"rows": torch.zeros(3, 4, dtype=torch.bool)}, TypeError, r"got a tensor of \[3, 4\]"),
        (LAYER.bias, {"columns": [0]}, ValueError, r"has shape \[3\], so it has no columns. Give rows"),
        (nn.BatchNorm1d(3), {"columns": [0]}, ValueError, "so it has no columns"),
        (nn.Parameter(torch.tensor(1.0)), {"rows": 0}, ValueError, "is a single number"),
        (nn.ReLU(), {}, ValueError, "ReLU has no parameters"),
        (nn.ReLU(), {"rows": [0]}, ValueError, "ReLU belong together is not known. It has no parameters"),
        (network(), {"rows": [0]}, ValueError, "of Sequential .* not known. Freeze its layers one by one: 0, 2"),
        (nn.LSTM(3, 4), {"rows": [0]}, ValueError, "Freeze a parameter of it, e.g. weight_ih_l0"),
        (nn.ConvTranspose2d(3, 3, 3), {"rows": [0]}, ValueError, "Freeze a parameter of it, e.g. weight"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), {"rows": [0]}, ValueError, "not known"),
        (nn.Embedding(5, 3, max_norm=1.0), {"rows": [0]}, ValueError, "has max_norm"),
        (nn.LazyLinear(3), {"rows": [0]}, ValueError, "is lazy.* Run the model once first"),
        (nn.LazyLinear(3), {}, ValueError, "is lazy"),
        (QUANTISED, {"rows": [0]}, ValueError, r"is quantised or holds integers \(int8\)"),
        (nn.Linear(4, 3, device="meta"), {"rows": [0]}, ValueError, "meta device"),
        (nn.BatchNorm1d(3).num_batches_tracked, {}, TypeError, "Only parameters are changed by an optimizer"),
        ("layer", {}, TypeError, "needs a torch module or a parameter of one, got 'layer'"),
    ],
)
def test_what_cannot_be_frozen_is_refused_with_the_reason(target, options, error, words):
    before = set(freezing._live)
    with pytest.raises(error, match=words):
        agscl.freeze(target, **options)
    assert set(freezing._live) <= before, "and nothing is left behind"


def test_a_state_of_something_else_is_refused():
    frozen = agscl.freeze(network()[0], rows=[0])
    state = frozen.state_dict()
    with pytest.raises(ValueError, match="not a state of weight, bias"):
        frozen.load_state_dict({"weight": state["weight"]})
    with pytest.raises(ValueError, match="freezes row 9 of 6"):
        frozen.load_state_dict({**state, "weight": {**state["weight"], "rows": torch.tensor([9])}})
    with pytest.raises(ValueError, match=r"expected values of shape \[1, 8\], got \[1, 7\]"):
        frozen.load_state_dict({**state, "weight": {**state["weight"], "values": torch.zeros(1, 7)}})


def test_a_layer_that_changed_its_size_is_an_error_that_says_what_to_do():
    model = network()
    agscl.freeze(model[0], rows=[0])
    model[0].weight = nn.Parameter(torch.zeros(7, 8))
    with pytest.raises(RuntimeError, match=r"Call close\(\) before the layer changes its size"):
        decaying(model).step()
    decaying(network()).step()  # which has nothing to do with it
