"""PRKV: kept rows, digests and the pages that are found, against the oracle."""

import numpy as np
import pariskv_core as pk
import pytest
from prkv_life import Life, make_config

pytestmark = pytest.mark.cpu("the CUDA backend has no code for PRKV yet")

POLICIES = {
    "quarter": pk.PRKV(budget=64, static_share=0.25, page=16),
    "half": pk.PRKV(budget=32, static_share=0.5, page=8),
    "odd budget": pk.PRKV(budget=45, static_share=0.5, page=8, digest="max"),
    "pages alone": pk.PRKV(budget=48, static_share=0.0, page=16),
    "kept alone": pk.PRKV(budget=30, static_share=1.0, page=8),
    "auto": pk.PRKV(budget=40, static_share="auto", page=8),
    "large pages": pk.PRKV(budget=128, static_share=0.5, page=64),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(2))
def test_a_random_life_attends_to_what_the_oracle_does(policy, seed):
    config = make_config(policy, dense_below=[0, 90][seed % 2])
    lives = [Life(config, seed)]
    rng = np.random.default_rng(1000 + seed)
    options = [{}, {"scale": 0.5}, {"softcap": 2.0}, {"scale": 0.07, "softcap": 5.0}]
    for step in range(30):
        life = lives[rng.integers(len(lives))]
        some = options[rng.integers(4)]
        deed = rng.integers(12)
        if step == 0 or deed == 0:
            life.prefill(int(rng.integers(1, 200)), queries=bool(rng.integers(4)), **some)
        elif deed <= 6:
            for _ in range(rng.integers(1, 30)):
                life.decode(**some)
        elif deed == 7:
            life.attend(int(rng.integers(1, 90)), **some)
        elif deed == 8:
            life.flush()
        elif deed == 9 and len(lives) < 4:
            lives.append(life.fork())
        else:
            life.truncate(int(rng.integers(1, [8, 40, 90][rng.integers(3)])))
        for each in lives:
            each.check()
    if policy.static_share != 0:
        assert sum(life.model.keeps for life in lives) > 1
    assert lives[0].cache.stats().keeps >= lives[0].model.keeps
