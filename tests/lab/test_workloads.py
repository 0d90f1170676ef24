"""Each ingredient of the lab's workloads is there when asked for, and only then."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
from quality import workloads
from quality.workloads import Spec, make

BASE = Spec(tokens=2048, steps=8, seed=3)
BARE = dataclasses.replace(
    BASE, topics=False, mean=0.0, outliers=0, rope=False, sinks=(), planted=False
)


def but(base: Spec = BARE, **changes) -> workloads.Workload:
    return make(dataclasses.replace(base, **changes))


def attention(load: workloads.Workload, ask: int = 0) -> np.ndarray:
    """(steps, group, tokens)."""
    asked = load.asks[ask]
    logits = asked.queries @ load.keys[: asked.position].T / np.sqrt(BASE.head_dim)
    return np.exp(logits - oracle.log_sum_exp(logits)[..., None])


def test_the_same_spec_is_the_same_workload():
    first, again, other = make(BASE), make(BASE), but(BASE, seed=4)
    for name in ("keys", "values", "recent"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        assert getattr(first, name).dtype == np.float32
        assert not np.array_equal(getattr(first, name), getattr(other, name))
    np.testing.assert_array_equal(first.asks[0].queries, again.asks[0].queries)


def test_every_variant_can_be_made_and_differs():
    made = {name: make(spec).keys for name, spec in workloads.variants(BASE).items()}
    whole = made.pop("all of it")
    assert all(np.isfinite(keys).all() for keys in made.values())
    assert not any(np.array_equal(keys, whole) for keys in made.values())


def test_queries_are_as_sharp_as_asked():
    for sharpness in (1.0, 2.0):
        load = but(sharpness=sharpness)
        logits = load.asks[0].queries @ load.keys.T / np.sqrt(BASE.head_dim)
        np.testing.assert_allclose(logits.std(axis=-1), sharpness, rtol=0.01)


@pytest.mark.parametrize(("power", "share"), [(0.0, 0.08), (0.5, 0.5), (0.75, 0.75)])
def test_spectrum(power, share):
    eigenvalues = np.linalg.eigvalsh(np.cov(but(spectrum=power).keys, rowvar=False))
    assert eigenvalues[-10:].sum() / eigenvalues.sum() == pytest.approx(share, abs=0.08)


def test_topics_make_neighbours_alike():
    def likeness(load: workloads.Workload, apart: int) -> float:
        unit = load.keys / np.linalg.norm(load.keys, axis=1, keepdims=True)
        return float((unit[:-apart] * unit[apart:]).sum(axis=1).mean())

    topical = but(topics=True)
    assert likeness(topical, 1) > 0.25
    assert abs(likeness(topical, workloads.TOPIC_TOKENS)) < 0.15
    assert abs(likeness(but(), 1)) < 0.02


@pytest.mark.parametrize("channels", [0, 4, 8, 16])
def test_outlier_channels(channels):
    means = np.abs(but(outliers=channels).keys.mean(axis=0))
    assert (means > 7).sum() == channels
    # They are slow rotary pairs, and the slowest is left to the sinks.
    pairs = np.flatnonzero(means > 7) % 64
    assert set(pairs) == set(range(63 - channels // 2, 63))


def test_rope_turns_by_position_alone():
    plain, turned = but(), but(rope=True)
    np.testing.assert_allclose(
        np.linalg.norm(turned.keys, axis=1), np.linalg.norm(plain.keys, axis=1), rtol=1e-4
    )
    np.testing.assert_allclose(turned.keys[0], plain.keys[0], atol=1e-6)
    pair = plain.keys[:2]
    near, far, other = (workloads.rope(pair, np.array(p)) for p in ((5, 9), (805, 809), (5, 10)))
    assert near[0] @ near[1] == pytest.approx(far[0] @ far[1], rel=1e-3)
    assert near[0] @ near[1] != pytest.approx(other[0] @ other[1], rel=1e-3)


@pytest.mark.parametrize("sinks", [(0.0,), (0.5,)])
def test_sinks_are_attended_to_by_every_query(sinks):
    load = but(rope=True, sinks=sinks)
    first = int(sinks[0] * BASE.tokens)
    count = workloads.FRONT_SINKS if first == 0 else 1
    held = attention(load)[..., first : first + count].sum(axis=-1)
    assert 0.15 < held.mean() < 0.45
    assert held.min() > 0.01
    without = attention(but(rope=True))[..., first : first + count].sum(axis=-1)
    assert without.mean() < 0.02


def test_planted_rows_are_every_heads_best_at_all_depths():
    load = but(BASE, margin=1.5)
    asked = load.asks[0]
    logits = asked.queries @ load.keys.T / np.sqrt(BASE.head_dim)
    planted = logits[np.arange(BASE.steps), :, asked.planted]
    others = np.delete(logits, asked.planted, axis=2)
    # Sinks come first, and may be better still.
    best = others[..., workloads.FRONT_SINKS :].max(axis=-1)
    np.testing.assert_array_less(1.4, planted - best)
    assert asked.planted.min() < 0.1 * BASE.tokens < 0.8 * BASE.tokens < asked.planted.max()


def test_heads_agree_as_much_as_asked():
    def likeness(load: workloads.Workload) -> float:
        q = load.asks[0].queries
        q = q / np.linalg.norm(q, axis=-1, keepdims=True)
        return float((q[:, 0] * q[:, -1]).sum(axis=-1).mean())

    assert likeness(but(agreement=(0.9, 0.9), steps=64)) == pytest.approx(0.81, abs=0.08)
    assert likeness(but(agreement=(0.9, 0.3), steps=64)) == pytest.approx(0.27, abs=0.1)


def test_shifted_queries_point_away_from_the_keys():
    def towards_the_mean(shift: float) -> float:
        load = but(mean=0.5, query_shift=shift)
        return float((load.asks[0].queries @ load.keys.mean(axis=0)).mean())

    assert towards_the_mean(0.5) < towards_the_mean(0.0) - 5


def test_norms():
    unit = np.linalg.norm(but(norms="unit").keys, axis=1)
    np.testing.assert_allclose(unit, np.sqrt(128), rtol=1e-4)
    mixed = np.log(np.linalg.norm(but(norms="mixed").keys, axis=1))
    natural = np.log(np.linalg.norm(but().keys, axis=1))
    assert mixed.std() > 1.5 * natural.std()


def test_slow_drift_is_slow_and_a_switch_is_abrupt():
    def means(kind: str) -> list[float]:
        """Along the first mean: prompt, a quarter of the drift, three quarters, the end."""
        load = but(mean=0.5, drift=kind, decoded=2048, asked_at=(2048, 4096))
        first = load.keys[:2048].mean(axis=0)
        parts = [slice(0, 2048), slice(2304, 2816), slice(3328, 3840), slice(3968, 4096)]
        return [float(load.keys[p].mean(axis=0) @ first / (first @ first)) for p in parts]

    np.testing.assert_allclose(means("none"), [1, 1, 1, 1], atol=0.15)
    np.testing.assert_allclose(means("slow"), [1, 0.5, -0.5, -0.94], atol=0.2)
    np.testing.assert_allclose(means("switch"), [1, 1, -1, -1], atol=0.15)


def test_drift_turns_the_basis():
    load = but(drift="switch", decoded=2048, asked_at=(4096,))
    before, after = load.keys[:2048], load.keys[3072:]
    top = np.linalg.eigh(np.cov(before, rowvar=False))[1][:, -5:]
    assert (after @ top).var(axis=0).sum() < 0.5 * (before @ top).var(axis=0).sum()


def test_search_matters():
    # If any rows would do, or if one alone did, every measure would be about nothing.
    worth = np.sort(attention(make(BASE)).mean(axis=1), axis=-1)
    best, one, any_rows = worth[:, -100:].sum(), worth[:, -1].sum(), np.median(worth, axis=1)
    assert best / BASE.steps > 0.3
    assert one < 0.8 * best
    assert 100 * any_rows.mean() < 0.05 * best / BASE.steps
