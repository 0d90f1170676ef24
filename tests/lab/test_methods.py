"""The quality lab's ground: what a method is, the oracle, and the measures, against plain NumPy."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from quality import methods
from quality.measures import Quality, Resident, measure, recall
from quality.methods import best_rows, make_method

STEPS, GROUP, DIM, ZONE = 5, 3, 16, 200


@pytest.fixture
def scene(gauss):
    """Queries, zone keys and values, resident keys and values."""
    queries = 3 * gauss(STEPS, GROUP, DIM)
    return queries, gauss(ZONE, DIM), gauss(ZONE, DIM), gauss(7, DIM), gauss(7, DIM)


def attention(scene) -> np.ndarray:
    """Of every head over everything, resident rows last: (steps, group, tokens)."""
    queries, keys, _, stay, _ = (x.double().numpy() for x in scene)
    logits = queries @ np.concatenate([keys, stay]).T / np.sqrt(DIM)
    return np.exp(logits - oracle.log_sum_exp(logits)[..., None])


def test_best_rows_are_best_first_and_ties_go_to_the_earlier_row():
    whole = torch.tensor([[3, 7, 7, 1, 7], [0, 0, 0, 0, 0]])
    assert best_rows(whole, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    floats = torch.tensor([[0.1, float("-inf"), 2.0, float("-inf")]])
    assert best_rows(floats, 3).tolist() == [[2, 0, -1]]
    assert best_rows(floats, 6).tolist() == [[2, 0, -1, -1, -1, -1]]


def test_the_oracle_takes_the_rows_with_most_attention(scene):
    queries, keys, _, stay, stay_values = scene
    best = make_method("oracle")
    best.prefill(keys, None)
    chosen = best.select(queries, 20, Resident.of(queries, stay, stay_values).lse)
    worth = attention(scene)[..., :ZONE].mean(axis=1)
    expected = np.argsort(-worth, axis=1)[:, :20]
    np.testing.assert_array_equal(chosen.numpy(), expected)


def test_a_head_served_by_its_window_has_no_say(scene):
    queries, keys, *_ = scene
    best = make_method("oracle")
    best.prefill(keys, None)
    content = torch.full((STEPS, GROUP), 1e3)
    content[:, 0] = -1e3
    alone = best.select(queries[:, :1], 20, content[:, :1])
    assert torch.equal(best.select(queries, 20, content), alone)


def test_chunks_of_steps_change_nothing(scene, monkeypatch):
    queries, keys, values, stay, stay_values = scene
    resident = Resident.of(queries, stay, stay_values)
    best = make_method("oracle")
    best.prefill(keys, None)
    whole = best.select(queries, 20, resident.lse)
    at_once = measure(queries, keys, whole.flip(1)[:, :9], resident, values)
    monkeypatch.setattr(methods, "_CHUNK", 2 * GROUP * ZONE)
    assert len(list(methods.step_chunks(STEPS, GROUP * ZONE))) == 3
    assert torch.equal(best.select(queries, 20, resident.lse), whole)
    in_parts = measure(queries, keys, whole.flip(1)[:, :9], resident, values)
    assert in_parts.summary() == pytest.approx(at_once.summary(), rel=1e-5)


def test_the_window_is_the_last_rows(scene):
    queries, keys, *_ = scene
    window = make_method("window")
    window.prefill(keys[:6], None)
    assert window.select(queries, 4, queries[..., 0])[0].tolist() == [5, 4, 3, 2]
    window.append(keys[6:8])
    assert window.select(queries, 10, queries[..., 0])[2].tolist() == [*range(7, -1, -1), -1, -1]


def test_measures_agree_with_their_definitions(scene, rng):
    queries, keys, values, stay, stay_values = scene
    chosen = np.stack([rng.choice(ZONE, 12, replace=False) for _ in range(STEPS)])
    chosen[1, 9:] = -1
    resident = Resident.of(queries, stay, stay_values)
    found = measure(queries, keys, torch.from_numpy(chosen), resident, values)

    p = attention(scene)
    everything = np.concatenate([values.double().numpy(), stay_values.double().numpy()])
    for step in range(STEPS):
        mine = chosen[step][chosen[step] >= 0]
        worth = p[step, :, :ZONE].mean(axis=0)
        best = np.argsort(-worth)[:12]
        attended = np.concatenate([mine, np.arange(ZONE, ZONE + 7)])
        held = p[step][:, attended]
        ours = held / held.sum(axis=1, keepdims=True) @ everything[attended]
        full = p[step] @ everything
        expected = {
            "recall": len(np.intersect1d(mine, best)) / 12,
            "share": worth[mine].sum() / worth[best].sum(),
            "lse_error": -np.log(held.sum(axis=1)).mean(),
            "output_error": np.linalg.norm(ours - full) / np.linalg.norm(full),
        }
        for name, number in expected.items():
            measured = getattr(found, name)
            measured = measured() if callable(measured) else measured
            assert measured[step].item() == pytest.approx(number, abs=1e-5), name
        np.testing.assert_allclose(found.mass[step], p[step][:, mine].sum(axis=1), atol=1e-6)
    assert found.summary()["worst_head"] < found.summary()["share"] < 1


def test_all_rows_are_as_good_as_full_attention(scene):
    queries, keys, values, stay, stay_values = scene
    resident = Resident.of(queries, stay, stay_values)
    full = make_method("full")
    full.prefill(keys, None)
    found = measure(queries, keys, full.select(queries, 10, resident.lse), resident, values)
    assert found.summary() == pytest.approx(
        {
            "recall": 1,
            "share": 1,
            "worst_head": 1,
            "mass": found.best_mass.mean().item(),
            "lse_error": 0,
            "output_error": 0,
        },
        abs=1e-5,
    )


def test_the_worst_head_is_summed_before_the_division():
    quality = Quality(
        recall=torch.zeros(2),
        # The second head needs nothing at the first step, and finds half of it at the second.
        mass=torch.tensor([[0.8, 0.0], [0.8, 0.2]]),
        best_mass=torch.tensor([[0.8, 1e-9], [0.8, 0.4]]),
        lse_error=torch.zeros(2),
    )
    assert quality.worst_head() == pytest.approx(0.5)
    assert quality.share().tolist() == pytest.approx([1, 1 / 1.2])


def test_recall_counts_each_row_once():
    best = torch.tensor([[0, 1, 2, 3], [4, 5, -1, -1]])
    chosen = torch.tensor([[3, 9, 0, -1], [5, 0, -1, -1]])
    assert recall(chosen, best).tolist() == [0.5, 0.5]
