"""A certificate can be checked later, by anyone, with the tensors alone."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agscl import AGSCL, EWC, Certificate, FineTune, MultiHead, PaperAGSCL, Together
from agscl.certificate import NEVER, verify
from agscl.digests import digest_groups
from agscl.methods._parts.warnings import SelfCheckWarning
from agscl.probe_outputs import ProbeOutputs
from loops import adam, bits, learn, make, mlp


def chain(tasks=3, cls=PaperAGSCL, **settings):
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    optimizer = adam(model)
    method = make(cls, model, **settings)
    certificates = []
    for number in range(tasks):
        learn(method, optimizer, number)
        certificates.append(method.certificate())
    return method, certificates, bits(model)


GOOD = {"mu": 8, "lam": math.inf, "rho": 0.3}


def test_a_chain_of_guaranteed_certificates_verifies_against_the_final_weights():
    _, certificates, tensors = chain(**GOOD)
    verdict = verify(certificates, tensors)
    assert verdict.ok, verdict.lines
    assert all(c.kind == "guaranteed" for c in certificates)
    assert not any(c.moved for c in certificates)
    assert certificates[1].held == certificates[0].important
    assert certificates[2].zeros() > 0


def test_it_survives_the_way_to_disk_and_back(tmp_path):
    _, certificates, tensors = chain(**GOOD)
    certificates[-1].save(tmp_path / "c.json")
    loaded = Certificate.load(tmp_path / "c.json")
    assert loaded == certificates[-1]
    assert loaded.check(tensors).ok
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def flip(tensor, index):
    """Change the last bit of one number."""
    tensor.view(torch.int32)[index] ^= 1


def test_one_flipped_bit_in_a_frozen_row_is_found_and_named():
    _, certificates, tensors = chain(**GOOD)
    row = certificates[-1].important[0]
    flip(tensors["trunk.0.weight"], (row, 3))
    finding = certificates[-1].check(tensors)
    assert finding.moved == [row]
    verdict = verify(certificates, tensors)
    assert not verdict.ok
    assert any("FAILED" in line and str(row) in line for line in verdict.lines)


def test_one_flipped_bit_in_an_old_head_is_found_and_named():
    _, certificates, tensors = chain(**GOOD)
    flip(tensors["heads.t0.bias"], (0,))
    verdict = verify(certificates, tensors)
    assert not verdict.ok
    assert any("'t0'" in line and "head" in line for line in verdict.lines)


def test_a_weight_that_should_be_exactly_zero_is_found_when_it_is_not():
    _, certificates, tensors = chain(**GOOD)
    certificate = certificates[-1]
    pattern = certificate._zero_pattern("trunk.2.weight")
    row, column = map(int, torch.from_numpy(pattern).nonzero()[0])
    tensors["trunk.2.weight"][row, column] = 1e-30
    assert certificate.check(tensors).nonzero == {"trunk.2.weight": 1}


def test_a_check_says_in_a_sentence_what_changed():
    method, certificates, tensors = chain(**GOOD)
    assert str(certificates[-1].check(tensors)) == "every certified bit is there"
    row = int((~method.free[method.graph.layers["trunk.2"].groups]).nonzero()[0])
    tensors["trunk.2.bias"][row] += 1
    tensors["heads.t0.bias"] += 1
    assert str(certificates[-1].check(tensors)) == (
        "CHANGED since the certificate was made: nodes (1 in trunk.2.weight, 1 in trunk.2.bias); the heads of t0"
    )


def test_free_rows_may_change_without_breaking_anything():
    _, certificates, tensors = chain(**GOOD)
    free = [g for g, task in enumerate(certificates[-1].first) if task == NEVER and g < 32]
    tensors["trunk.0.weight"][free] += 1
    assert verify(certificates, tensors).ok


def test_nodes_held_once_that_moved_later_are_reported_with_the_task_and_do_not_fail():
    _, certificates, tensors = chain(mu=8, lam=0.05, rho=0.3)
    assert certificates[1].kind == "held"
    assert certificates[1].moved
    verdict = verify(certificates, tensors)
    assert verdict.ok
    assert any("changed in task 't1'" in line for line in verdict.lines)


def test_guaranteed_nodes_that_moved_in_a_later_task_fail_loudly_with_its_name():
    _, certificates, _ = chain(**GOOD)
    _, drifting, tensors = chain(mu=8, lam=0.05, rho=0.3)
    forged = [certificates[0], *drifting[1:]]
    verdict = verify(forged, tensors)
    assert not verdict.ok
    assert any("'t1'" in line and "FAILED" in line for line in verdict.lines)


def test_a_certificate_of_another_network_is_not_accepted():
    _, certificates, tensors = chain(**GOOD)
    del tensors["trunk.2.weight"]
    with pytest.raises(ValueError, match=r"trunk\.2\.weight"):
        certificates[-1].check(tensors)
    assert not verify([], tensors).ok


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "agscl-certificate-1", "probe": null}', "not json"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ValueError, match=r"c\.json"):
        Certificate.load(tmp_path / "c.json")


def test_fine_tuning_certifies_its_heads_and_nothing_else():
    _, certificates, tensors = chain(cls=FineTune)
    assert certificates[-1].important == []
    assert verify(certificates, tensors).ok
    flip(tensors["heads.t1.weight"], (0, 0))
    assert not verify(certificates, tensors).ok


def test_the_probe_is_a_second_witness_equal_to_the_bit_under_the_same_conditions():
    method, certificates, _ = chain(**GOOD)
    probe = certificates[0].probe
    batch = ProbeOutputs.draw_batch(probe.shape, probe.seed)
    assert probe.same_environment(batch)
    assert probe.compare(batch, method.head_outputs(batch)) == {"t0": 0.0}
    with torch.no_grad():
        method.model.trunk[0].weight[certificates[0].important[0]] += 1
    assert probe.compare(batch, method.head_outputs(batch))["t0"] > 0
    with pytest.raises(ValueError, match="batch"):
        probe.compare(batch + 1, method.head_outputs(batch))


def test_a_probe_of_ones_own_is_known_by_its_digest_and_never_stored():
    method, _, _ = chain(tasks=1, **GOOD)
    batch = torch.rand(5, 16)
    probe = method.certificate(batch).probe
    assert probe.seed is None
    assert probe.compare(batch, method.head_outputs(batch)) == {"t0": 0.0}


def test_it_says_in_one_line_what_it_proves():
    _, certificates, _ = chain(**GOOD)
    text = str(certificates[-1])
    assert "\n" not in text
    assert "kept every bit" in text
    assert "exactly 0" in text


def test_digests_tell_negative_from_positive_zero():
    one = digest_groups({"w": torch.tensor([[0.0]])}, {"w": [0]}, 1)
    other = digest_groups({"w": torch.tensor([[-0.0]])}, {"w": [0]}, 1)
    assert one != other


def test_the_file_is_plain_json(tmp_path):
    method, _, _ = chain(tasks=1, **GOOD)
    method.certificate().save(tmp_path / "c.json")
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["task"] == "t0"
    assert data["kind"] == "guaranteed"


# Old outputs that changed, whatever the cause


class CosineHead(nn.Linear):
    """Divides by the norm of all features, so that columns of 0 do not keep a feature out."""

    def forward(self, x):
        return F.linear(F.normalize(x), self.weight, self.bias)


class RunningMean(nn.Module):
    """Adds a moving average of what it saw, kept in a buffer of its own."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return x - self.mean


def two_tasks(trunk, *, head=nn.Linear, change=lambda model: None, when="within", **options):
    """Certificates of two tasks with λ = ∞; `change(model)` runs within the second, or before or after it."""
    torch.manual_seed(0)
    model = MultiHead(trunk, features=32)
    for number in range(2):
        model.add_head(f"t{number}", head(32, 3))
    optimizer = adam(model)
    method = PaperAGSCL(model, torch.randn(2, 16), **{**GOOD, **options})
    learn(method, optimizer, 0)
    certificates = [method.certificate()]
    learn(method, optimizer, 1, steps=range(4), end=False)
    if when == "within":
        change(model)
        optimizer.add_param_group({"params": list(find_new(model, optimizer))})
    learn(method, optimizer, 1, steps=range(4, 32), begin=False)
    if when == "after":
        change(model)
    certificates.append(method.certificate())
    return method, certificates


def find_new(model, optimizer):
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in model.parameters() if id(p) not in known]


def with_norm():
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()
    )


def frozen_first():
    trunk = nn.Sequential(nn.Linear(16, 16), *mlp())
    trunk[0].requires_grad_(False)
    return trunk


def widen_eps(model):
    model.trunk[1].eps = 0.1


CAUSES = {
    "a head that is a subclass of Linear with a forward of its own": (mlp, {"head": CosineHead}),
    "a layer unfrozen within a task": (frozen_first, {"change": lambda m: m.trunk[0].requires_grad_(True)}),
    "a module with a running buffer of its own": (lambda: nn.Sequential(RunningMean(16), *mlp()), {}),
    "a layer inserted within a task": (mlp, {"change": lambda m: m.trunk.append(nn.Linear(32, 32))}),
    "another eps of BatchNorm": (with_norm, {"change": widen_eps}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_old_outputs_that_changed_are_said_first_and_nothing_is_guaranteed(cause):
    make_trunk, options = CAUSES[cause]
    method, certificates = two_tasks(make_trunk(), **options)
    last = certificates[-1]
    assert last.kind == "held"
    assert last.changed_outputs == ["t0"]
    assert str(last).startswith("NOT GUARANTEED: outputs of task t0 on a random batch have changed")
    assert "guaranteed for good" not in str(last)
    verdict = verify(certificates, method.model.state_dict())
    assert any(line.startswith("t1: NOT GUARANTEED: outputs of task t0") for line in verdict.lines)
    if certificates[0].kind == "guaranteed":
        assert not verdict.ok
        assert any("FAILED: outputs of task 't0'" in line for line in verdict.lines)


@pytest.mark.parametrize("trunk", [mlp, with_norm])
def test_old_outputs_that_kept_their_bits_stay_guaranteed(trunk):
    _, certificates = two_tasks(trunk())
    assert [c.kind for c in certificates] == ["guaranteed", "guaranteed"]
    assert not certificates[-1].warnings
    assert "guaranteed for good" in str(certificates[-1])


def test_a_head_with_a_forward_of_its_own_is_named_before_anything_changed():
    _, certificates = two_tasks(mlp(), head=CosineHead)
    assert "heads.t0 (CosineHead) has a forward of its own" in str(certificates[0])


def test_a_layer_that_can_be_trained_since_the_method_was_made_is_named_before_anything_changed():
    method, certificates = two_tasks(frozen_first())
    assert certificates[-1].kind == "guaranteed"
    method.model.trunk[0].requires_grad_(True)
    certificate = method.certificate()
    assert (certificate.kind, certificate.changed_outputs) == ("held", [])
    assert "trunk.0.weight was frozen, or missing, when the method was made" in str(certificate)


def test_outputs_are_compared_with_those_recorded_before_a_resume():
    method, _ = two_tasks(with_norm())
    resumed = PaperAGSCL(copy.deepcopy(method.model), torch.randn(2, 16), **GOOD)
    resumed.load_state_dict(method.state_dict())
    assert resumed.certificate().kind == "guaranteed"
    widen_eps(resumed.model)
    certificate = resumed.certificate()
    assert (certificate.kind, certificate.changed_outputs) == ("held", ["t0", "t1"])


def test_outputs_are_compared_although_no_certificate_was_made_before():
    torch.manual_seed(0)
    model = MultiHead(with_norm(), features=32)
    method, optimizer = PaperAGSCL(model, torch.randn(2, 16), **GOOD), adam(model)
    learn(method, optimizer, 0)
    widen_eps(model)
    learn(method, optimizer, 1)
    assert method.certificate().changed_outputs == ["t0"]


def test_a_probe_of_ones_own_is_compared_with_the_certificate_before():
    method, _, _ = chain(tasks=1, cls=FineTune)
    batch = torch.randn(4, 16)
    assert method.certificate(batch).changed_outputs == []
    with torch.no_grad():
        method.model.trunk[0].weight += 1
    assert method.certificate(batch).changed_outputs == ["t0"]


def test_outputs_recorded_in_another_environment_are_not_compared(monkeypatch):
    method, _ = two_tasks(mlp())
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    widen = method.model.trunk[0].register_forward_hook(lambda module, args, output: output * (1 + 1e-6))
    certificate = method.certificate()
    widen.remove()
    assert certificate.changed_outputs == []
    assert any("outputs of t0, t1 were not compared" in note for note in certificate.notes)


def test_what_is_recorded_of_outputs_stays_small():
    method, _, _ = chain(tasks=1, **GOOD)
    for _ in range(10):
        method.certificate(torch.randn(4, 16))
    assert len(method.knowledge.given_output_digests) == 4


def test_probes_given_to_certificates_do_not_displace_the_methods_own():
    method, _, _ = chain(tasks=2, **GOOD)
    for _ in range(10):
        method.certificate(torch.randn(4, 16))
    method.model.trunk[3] = nn.Hardtanh(0, 0.3)
    assert method.certificate().changed_outputs == ["t0", "t1"]


def test_a_weight_that_had_to_be_zero_and_is_not_is_said_at_once():
    method, _, _ = chain(tasks=2, cls=AGSCL, zero_init="paper")
    free, reader = method.free, method.graph.readers["trunk.2"]
    important = (~free[method.graph.layers["trunk.2"].groups]).nonzero()[0]
    with torch.no_grad():
        method.model.trunk[2].weight[important, free[reader.sources].nonzero()[0]] = 5.0
    certificate = method.certificate()
    assert certificate.kind == "held"
    assert "the weights of 1 of 51 important nodes changed after end_task" in str(certificate)
    assert "exactly 0" not in str(certificate)


# What limits a guarantee


def test_without_zeros_nothing_is_guaranteed():
    _, certificates = two_tasks(mlp(), zero_init="off")
    assert certificates[-1].kind == "held"
    assert str(certificates[-1]).startswith("NOT GUARANTEED: ")
    assert "zero_init='off'" in str(certificates[-1])
    assert "guaranteed for good" not in str(certificates[-1])


@pytest.mark.parametrize("zero_init", ["off", "while_free"])
def test_with_a_finite_lam_the_zero_rule_is_a_note(zero_init):
    _, certificates, _ = chain(tasks=1, mu=8, lam=1.0, zero_init=zero_init)
    assert f"zero_init='{zero_init}'" in str(certificates[0])


class WithExcluded(nn.Sequential):
    """A LayerNorm in the middle, which reads nodes and is read by nodes."""

    def __init__(self):
        super().__init__(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()
        )


@pytest.mark.parametrize("excluded", ["freeze", "train"])
def test_excluded_layers_that_read_nodes_leave_outputs_uncovered_which_is_said_first(excluded):
    method, certificates = two_tasks(WithExcluded(), exclude=["trunk.2", "trunk.3"], excluded=excluded)
    for certificate in certificates:
        assert certificate.kind == "held"
        assert str(certificate).startswith("NOT GUARANTEED: ")
        assert "trunk.2 is excluded" in str(certificate)
    verdict = verify(certificates, method.model.state_dict())
    assert any("NOT GUARANTEED" in line and "trunk.2 is excluded" in line for line in verdict.lines)


def test_an_excluded_layer_that_reads_only_the_input_and_is_frozen_keeps_the_guarantee():
    trunk = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), *mlp())
    _, certificates = two_tasks(trunk, exclude=["trunk.0"])
    assert certificates[-1].kind == "guaranteed"
    assert "trunk.0 (excluded)" in str(certificates[-1])


def test_an_excluded_layer_that_reads_only_the_input_leaves_outputs_uncovered_where_tasks_train_it():
    trunk = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), *mlp())
    _, certificates = two_tasks(trunk, exclude=["trunk.0"], excluded="train")
    assert certificates[0].kind == "held"
    assert str(certificates[0]).startswith("NOT GUARANTEED: ")
    assert "trunk.0 is excluded, and every task trains it" in str(certificates[0])


def test_weights_changed_after_end_task_are_named_and_nothing_is_said_to_be_kept():
    def stray_step(model):
        with torch.no_grad():
            for parameter in model.trunk.parameters():
                parameter.add_(1e-3)

    method, certificates = two_tasks(mlp(), change=stray_step, when="after")
    last = certificates[-1]
    assert last.kind == "held"
    assert last.moved_after_task == last.important
    assert f"the weights of {len(last.important)} of {len(last.important)} important nodes changed after" in str(last)
    assert "kept every bit" not in str(last)
    assert "guaranteed for good" not in str(last)
    assert not verify(certificates, method.model.state_dict()).ok


def test_one_row_changed_after_end_task_is_no_longer_among_those_that_held():
    method, certificates = two_tasks(mlp())
    row = certificates[0].important[0]
    with torch.no_grad():
        method.model.trunk[0].weight[row] += 1
    certificate = method.certificate()
    assert certificate.moved_after_task == [row]
    assert row not in certificate.held
    assert row in certificate.moved


def test_methods_together_certify_what_their_members_certify():
    torch.manual_seed(0)
    model = MultiHead(mlp(), features=32)
    optimizer = adam(model)
    method = Together(EWC(model, lam=1.0), PaperAGSCL(model, torch.zeros(2, 16), **GOOD))
    certificates = []
    for number in range(2):
        learn(method, optimizer, number)
        certificates.append(method.certificate())
    last = certificates[-1]
    assert last.kind == "guaranteed"
    assert last.held == certificates[0].important != []
    assert last.probe is not None
    assert verify(certificates, model.state_dict()).ok
    with torch.no_grad():
        model.trunk[0].weight[last.important[0]] += 1
    assert method.certificate().moved_after_task == [last.important[0]]


@pytest.mark.parametrize("width", [16, 64])
def test_a_check_against_another_width_says_which_layer_is_wrong(width):
    _, certificates, _ = chain(tasks=1, **GOOD)
    other = MultiHead(mlp(width), features=width)
    other.add_head("t0", 3)
    with pytest.raises(ValueError, match=rf"trunk\.0\.weight has {width} rows, expected 32"):
        certificates[0].check(other.state_dict())


def test_a_check_against_other_columns_says_which_layer_is_wrong():
    _, certificates, tensors = chain(tasks=1, **GOOD)
    tensors["trunk.2.weight"] = torch.zeros(32, 40)
    with pytest.raises(ValueError, match=r"trunk\.2\.weight has 40 columns, expected 32"):
        certificates[0].check(tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [PaperAGSCL, FineTune])
def test_a_check_of_weights_in_another_dtype_names_the_dtypes_and_not_changed_values(cls, dtype):
    _, certificates, tensors = chain(tasks=1, cls=cls, **(GOOD if cls is PaperAGSCL else {}))
    converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    words = f"of dtype {str(dtype).removeprefix('torch.')}, and float32 when .* Convert to float32 and check again"
    with pytest.raises(ValueError, match=words):
        certificates[0].check(converted)
    with pytest.raises(ValueError, match=words):
        verify(certificates, converted)
    back = verify(certificates, {name: tensor.float() for name, tensor in converted.items()})
    assert back.ok is (dtype == torch.float64), back.lines


def test_a_model_converted_between_two_tasks_is_said_to_have_been_converted():
    method, certificates, _ = chain(tasks=1, **GOOD)
    model = method.model.double()
    model.trunk.register_forward_pre_hook(lambda trunk, args: args[0].double())
    with pytest.warns(SelfCheckWarning, match="are float64 and were float32"):
        learn(method, torch.optim.SGD(model.parameters(), lr=0.05), 1)
    verdict = verify([*certificates, method.certificate()], bits(model))
    assert not verdict.ok
    assert len(verdict.lines) == 1
    assert "float32 when task 't0' ended and float64 when 't1' did" in verdict.lines[0]


def test_memory_layout_belongs_to_the_environment_of_a_probe():
    conv, batch = nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8)
    probe = ProbeOutputs.from_outputs(batch, {}, 0, conv)
    assert probe.same_environment(batch, conv)
    assert not probe.same_environment(batch.to(memory_format=torch.channels_last), conv)
    assert not probe.same_environment(batch, conv.to(memory_format=torch.channels_last))


def test_notes_are_in_the_text_and_in_what_verify_says():
    trunk = nn.Sequential(nn.Linear(16, 16), *mlp())
    trunk[0].requires_grad_(False)
    method, certificates = two_tasks(trunk)
    assert "2 frozen tensors (trunk.0.weight, …) are outside the digests" in str(certificates[-1])
    verdict = verify(certificates, method.model.state_dict())
    assert verdict.lines.count("note: 2 frozen tensors (trunk.0.weight, …) are outside the digests") == 1


def test_a_certificate_saved_without_the_newer_fields_can_be_read(tmp_path):
    _, certificates, tensors = chain(tasks=1, **GOOD)
    certificates[0].save(tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    for name in ("changed_outputs", "moved_after_task", "uncovered", "dtypes"):
        del content[name]
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert Certificate.load(tmp_path / "c.json").check(tensors).ok
