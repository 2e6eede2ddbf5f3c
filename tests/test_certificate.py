"""A certificate can be checked later, by anyone, with the tensors alone."""

from __future__ import annotations

import json
import math

import pytest
import torch

from agscl import AGSCL, Certificate, FineTune, MultiHead
from agscl.certificate import NEVER, ProbeOutputs, digest_groups, verify
from loops import adam, bits, learn, make, mlp


def chain(tasks=3, cls=AGSCL, **settings):
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
    assert any("moved in task 't1'" in line for line in verdict.lines)


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
