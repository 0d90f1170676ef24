"""PRKV as a value: defaults, equality, copies, and a sentence for all that is refused."""

import copy
import pickle

import pariskv_core as pk
import pytest
from prkv_life import make_config
from support import randn_kv, randn_q


def test_defaults_and_regions_are_the_papers():
    policy = pk.PRKV()
    assert (policy.budget, policy.static_share, policy.page) == (1024, 0.25, 32)
    assert policy.digest == "mean"
    with pk.Cache(make_config(policy, sink=-1, local=-1, update=-1, dense_below=-1)) as cache:
        config = cache.config
        assert (config.sink, config.local, config.update) == (4, 64, 128)
        assert config.dense_below == 0


CHANGED = {"budget": 77, "static_share": 0.5, "page": 8, "digest": "max"}


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("share", [0.5, 0, 1, "auto"])
def test_settings_print_compare_copy_and_pickle(field, share):
    changed = {**CHANGED, "static_share": share}
    policy = pk.PRKV(**changed)
    assert getattr(policy, field) == changed[field]
    config = make_config(policy)
    for twin in (
        eval(repr(policy), {"PRKV": pk.PRKV}),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        pickle.loads(pickle.dumps(config)).policy,
        policy.replace(),
    ):
        assert twin == policy
        assert hash(twin) == hash(policy)
    other = policy.replace(**{field: getattr(pk.PRKV(), field)})
    assert other != policy
    assert config.replace(policy=other) != config
    assert policy != pk.ParisKV()
    assert policy != pk.HardKV()


REFUSED = {
    "page of 24": ({"page": 24}, "policy.page: expected 8, 16, 32 or 64 neighbours, got 24"),
    "page of none": ({"page": 0}, "policy.page: expected 8, 16, 32 or 64 neighbours, got 0"),
    "budget under a page": (
        {"budget": 31},
        r"policy.budget: expected policy.page \(32\) to 8388608 rows, got 31",
    ),
    "huge budget": ({"budget": 2**23 + 1}, "policy.budget: expected .* rows, got 8388609"),
    "share below": ({"static_share": -0.1}, "static_share: expected a share of 0 to 1.*got -0.1"),
    "share above": ({"static_share": 1.01}, "static_share: expected a share of 0 to 1.*got 1.01"),
    "share that is no number": (
        {"static_share": float("nan")},
        "policy.static_share: expected a share of 0 to 1, or auto, got -?nan",
    ),
    "share by another name": (
        {"static_share": "own"},
        'policy.static_share: expected a share of 0 to 1, or "auto", got "own"',
    ),
    "digest": ({"digest": "sphere"}, 'policy.digest: expected "mean" or "max", got "sphere"'),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pk.PRKV(**settings)


def test_a_local_window_of_none_is_refused():
    with pytest.raises(ValueError, match="local: expected 1 token or more with the policy PRKV"):
        make_config(local=0)


def test_queries_that_do_not_fit_are_refused_before_a_prompt_is_stored(rng):
    with pk.Cache(make_config()) as cache:
        s = cache.add()
        k, v = randn_kv(rng, 40, cache.config)
        q = randn_q(rng, 40, cache.config)
        for wrong in (q[:39], q[:, :2], q[..., :32], q.double()):
            with pytest.raises(ValueError, match=r"\[prefill\] q: expected"):
                cache.prefill(0, [s], k, v, q=wrong)
        with pytest.raises(ValueError, match=r"\[prefill\] scale: expected"):
            cache.prefill(0, [s], k, v, q=q, scale=-1.0)
        assert cache.length(s) == 0


def test_files_are_for_another_policy(rng, tmp_path):
    with pk.Cache(make_config()) as cache:
        s = cache.add()
        with pytest.raises(ValueError, match=r"\[save\] policy: expected .* which is ParisKV"):
            cache.save(s, tmp_path / "file")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ValueError, match=r"\[load\] policy: expected .* which is ParisKV"):
            cache.load(tmp_path / "file")
