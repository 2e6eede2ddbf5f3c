import pytest
from hypothesis import given
from hypothesis import strategies as st

from agscl.analysis import metrics

FORGETS = [[0.9], [0.6, 0.8], [0.3, 0.4, 1.0]]


def test_average_accuracy_is_the_mean_of_the_last_row():
    assert metrics.average_accuracy(FORGETS) == pytest.approx((0.3 + 0.4 + 1.0) / 3)


def test_stability_compares_the_end_with_the_best_each_task_ever_had():
    improves_later = [[0.5], [0.8, 0.5], [0.4, 0.5, 0.7]]
    assert metrics.stability(improves_later) == pytest.approx((0.4 / 0.8 + 1 + 1) / 3)


def test_plasticity_compares_what_was_just_learned_with_the_reference():
    reference = [[1.0], [0.0, 0.5], [0.0, 0.0, 0.8]]
    assert metrics.plasticity(FORGETS, reference) == pytest.approx((0.9 / 1.0 + 0.8 / 0.5 + 1.0 / 0.8) / 3)


def test_fine_tuning_against_itself_has_plasticity_one():
    assert metrics.plasticity(FORGETS, FORGETS) == 1


def test_forgetting_leaves_the_last_task_out():
    assert metrics.forgetting(FORGETS) == pytest.approx(((0.9 - 0.3) + (0.8 - 0.4)) / 2)
    assert metrics.forgetting([[0.7]]) == 0


@st.composite
def never_forgetting(draw):
    tasks = draw(st.integers(1, 6))
    final = [draw(st.integers(1, 100)) / 100 for _ in range(tasks)]
    return [final[: row + 1] for row in range(tasks)]


@given(never_forgetting())
def test_a_matrix_whose_columns_never_change_is_fully_stable_and_forgets_nothing(accuracies):
    assert metrics.stability(accuracies) == 1
    assert metrics.forgetting(accuracies) == 0


def test_a_task_that_never_got_above_zero_lost_nothing():
    assert metrics.stability([[0.0], [0.0, 1.0]]) == 1
    assert metrics.stability([[-0.1], [-0.3, 1.0]]) == 1


def test_a_task_that_the_reference_never_learned_is_left_out_of_plasticity():
    assert metrics.plasticity([[0.5], [0.5, 0.4]], [[0.0], [0.0, 0.8]]) == 0.5
    assert metrics.plasticity([[0.0], [0.0, 0.4]], [[0.0], [0.0, 0.8]]) == 0.5
    assert metrics.plasticity([[-0.2], [0.0, 0.4]], [[-0.1], [0.0, 0.8]]) == 0.5, "a worse score is no better ratio"
    assert metrics.plasticity([[0.3]], [[0.0]]) is None


def test_a_matrix_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"row 1 .* 2 accuracies, not 1"):
        metrics.stability([[0.5], [0.5]])
    with pytest.raises(ValueError, match="empty"):
        metrics.average_accuracy([])
    with pytest.raises(ValueError, match="2 tasks against 3"):
        metrics.plasticity(FORGETS[:2], FORGETS)


def test_a_task_that_fine_tuning_never_learned_adds_nothing_to_the_accumulated_reward():
    reference = [{"relative": [0.0]}, {"relative": [0.0, -0.1]}, {"relative": [0.0, -0.2, 0.5]}]
    evaluations = [{"relative": [0.0]}, {"relative": [0.8, -0.2]}, {"relative": [0.8, -0.2, 0.4]}]
    assert metrics.accumulated_rewards(evaluations, reference) == [0.0, 0.0, 0.8]
    assert metrics.find_unlearned(reference) == [0, 1]


def test_forward_transfer_is_what_earlier_tasks_add_to_the_mean_score_while_learning():
    single = [{"task": 0, "relative": [0.2]}, {"task": 0, "relative": [0.4]}]
    single += [{"task": 1, "relative": [0.4, 0.1]}, {"task": 1, "relative": [0.4, 0.5]}]
    agent = [{"task": 0, "relative": [0.9]}, {"task": 0, "relative": [0.9]}]
    agent += [{"task": 1, "relative": [0.0, 0.5]}, {"task": 1, "relative": [0.0, 0.7]}]
    assert metrics.forward_transfer(agent, single) == pytest.approx(0.6 - 0.3), "the first task has none before it"
    assert metrics.forward_transfer(agent[:2], single[:2]) is None
