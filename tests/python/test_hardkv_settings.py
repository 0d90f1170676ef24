"""HardKV as a value: defaults, equality, copies, and a sentence for each refused setting."""

import copy
import pickle

import pariskv_core as pk
import pytest
from hardkv_life import make_config
from support import randn_kv, randn_q

about_values = pytest.mark.cpu("about settings, which no backend sees")


@about_values
def test_defaults_and_regions_are_the_papers():
    policy = pk.HardKV()
    assert (policy.most, policy.p, policy.least) == (2048, 0.9, 0)
    assert (policy.metric, policy.pool, policy.patience) == ("snapkv", 7, 1)
    assert policy.placement == "host"
    with pk.Cache(make_config(policy, sink=-1, local=-1, update=-1, dense_below=-1)) as cache:
        config = cache.config
        assert (config.sink, config.local, config.update) == (4, 32, 128)
        assert config.dense_below == 0


CHANGED = {
    "most": 7,
    "p": 0.25,
    "least": 3,
    "metric": "attention",
    "pool": 1,
    "patience": 0,
    "placement": "dropped",
}


@about_values
@pytest.mark.parametrize("field", CHANGED)
def test_settings_print_compare_copy_and_pickle(field):
    policy = pk.HardKV(**CHANGED)
    assert getattr(policy, field) == CHANGED[field]
    config = make_config(policy)
    for twin in (
        eval(repr(policy), {"HardKV": pk.HardKV}),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        pickle.loads(pickle.dumps(config)).policy,
        policy.replace(),
    ):
        assert twin == policy
        assert hash(twin) == hash(policy)
    other = policy.replace(**{field: getattr(pk.HardKV(), field)})
    assert other != policy
    assert config.replace(policy=other) != config
    assert policy != pk.ParisKV()


REFUSED = {
    "most": ({"most": 0}, "policy.most: expected 1 to 8388608, got 0"),
    "p of nothing": ({"p": 0.0}, "policy.p: expected a share above 0 and at most 1, got 0"),
    "p above one": ({"p": 1.5}, "policy.p: expected a share above 0 and at most 1, got 1.5"),
    "p that is no number": ({"p": float("nan")}, "policy.p: expected a share above 0"),
    "least above most": (
        {"most": 5, "least": 6},
        r"policy.least: expected 0 to policy.most \(5\), got 6",
    ),
    "negative least": ({"least": -1}, "policy.least: expected 0 to policy.most"),
    "even pool": ({"pool": 6}, "policy.pool: expected an odd number of neighbours, 1 to 63, got 6"),
    "huge pool": ({"pool": 65}, "policy.pool: expected an odd number of neighbours"),
    "patience": ({"patience": 16}, "policy.patience: expected 0 to 15, got 16"),
    "placement": (
        {"placement": "device"},
        'policy.placement: expected "host" or "dropped", got "device"',
    ),
    "metric": ({"metric": "rkv"}, 'policy.metric: expected "attention" or "snapkv", got "rkv"'),
}


@about_values
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pk.HardKV(**settings)


@about_values
def test_a_local_window_of_none_is_refused():
    with pytest.raises(ValueError, match="local: expected 1 token or more with the policy HardKV"):
        make_config(local=0)


def test_a_scale_that_is_none_is_refused_before_a_prompt_is_stored(rng):
    with pk.Cache(make_config()) as cache:
        s = cache.add()
        k, v = randn_kv(rng, 40, cache.config)
        q = randn_q(rng, 40, cache.config)
        for wrong, message in (({"scale": -1.0}, "scale"), ({"softcap": float("nan")}, "softcap")):
            with pytest.raises(ValueError, match=rf"\[prefill\] {message}: expected"):
                cache.prefill(0, [s], k, v, q=q, **wrong)
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
