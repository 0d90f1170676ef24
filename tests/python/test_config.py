"""Config: defaults as published, every field readable, and a sentence for what does not fit."""

import copy
import math
import pickle

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import HEAD_DIMS, POLICY_FIELDS, config_of, make_config

pytestmark = pytest.mark.cpu("a Config says the same for every device")

MODEL = {"layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128}


# From here on all keys have the same schedule.
LONGEST = [(600_000, 0.0125, 0.20)]


@pytest.mark.parametrize("whole", [{"block": 0}, {"scorer": "votes"}])
def test_whole_keys_have_a_schedule_of_their_own(whole):
    short = [(0, 0.50, 0.50), (5_000, 0.25, 0.30), (10_000, 0.20, 0.25), (30_000, 0.05, 0.20)]
    long = [(100_000, 0.04, 0.20), (250_000, 0.025, 0.20), *LONGEST]
    policy = pk.ParisKV(**whole)
    assert policy.schedule == short + long
    assert "schedule=None" in repr(policy)
    with pk.Cache(make_config(**{"block": 64, **whole}, schedule=None)) as cache:
        assert cache.config.policy.schedule == short + long
        assert "schedule=[(" in repr(cache.config.policy)


def test_dense_below_may_be_the_batchs():
    config = pk.Config(**MODEL, dense_below="batch")
    assert (config.dense_below, config.searched_from) == (4096, 4096)  # a CPU needs no batch
    on_gpu = config.replace(device="cuda")
    assert (on_gpu.dense_below, on_gpu.searched_from) == ("batch", 5632)
    assert pickle.loads(pickle.dumps(on_gpu)) == on_gpu
    assert "dense_below='batch'" in repr(on_gpu)
    assert on_gpu.replace(placement="host").dense_below == 2048
    assert on_gpu.replace(policy=pk.PRKV()).dense_below == 0
    assert on_gpu.replace(dense_below=-1).searched_from == 8192
    assert on_gpu.replace(dense_below=-1) != on_gpu
    with pytest.raises(ValueError, match=r'dense_below: expected .* "batch", got "often"'):
        pk.Config(**MODEL, dense_below="often")


def test_defaults_are_the_published_ones_but_for_the_search():
    config = pk.Config(**MODEL)
    assert (config.layers, config.query_heads, config.kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert config.dtype == "bfloat16"
    assert (config.sink, config.local, config.update, config.policy.top_k) == (4, 256, 512, 100)
    assert config.dense_below == 4096
    assert (config.policy.scorer, config.policy.group_rule) == ("sign_norm", "attention_mass")
    assert config.policy.schedule == [
        (0, 0.50, 0.50),
        (5_000, 0.05, 0.20),
        (100_000, 0.02, 0.20),
        *LONGEST,
    ]
    assert (config.policy.tail, config.policy.tail_rows, config.policy.error) == ("own", 1024, None)
    assert config.policy.min_candidates_per_row == 4
    assert config.policy.seed == 42
    assert config.device == "cpu"
    assert (config.threads, config.segment_tokens, config.memory_budget) == (0, 1024, 0)
    assert (config.placement, config.row_cache, config.host_budget) == ("auto", -1, 0)
    assert config.kv_dtype == "auto"


CHANGED = {
    "layers": 3,
    "query_heads": 6,
    "kv_heads": 3,
    "head_dim": 96,
    "value_dim": 192,
    "dtype": "float16",
    "sink": 0,
    "local": 0,
    "update": 1,
    "top_k": 7,
    "dense_below": 17,
    "scorer": "votes",
    "group_rule": "mean_query",
    "schedule": [(0, 0.05, 0.25), (100, 1.0, 1.0)],
    "min_candidates_per_row": 1,
    "seed": 2**64 - 1,
    "tail_rows": 99,
    "device": "cpu",
    "threads": 3,
    "segment_tokens": 128,
    "memory_budget": 12345678,
    "row_cache": 77,
    "kv_dtype": "int8",
}


@pytest.mark.parametrize("field", CHANGED)
def test_every_field_reads_back_and_is_shown(field):
    config = config_of(**CHANGED)
    value = getattr(config.policy if field in POLICY_FIELDS else config, field)
    if field == "schedule":
        assert [tuple(step) for step in value] == CHANGED[field]
    else:
        assert value == CHANGED[field]
    assert f"{field}=" in repr(config)


CONFIGS = {
    "defaults": pk.Config(**MODEL),
    "changed": config_of(**CHANGED),
    "a_third": config_of(**MODEL, schedule=[(0, 1 / 3, 0.1)]),
    "blocks": config_of(**MODEL, block=128),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_prints_copies_and_pickles_exactly(config):
    names = {"Config": pk.Config, "ParisKV": pk.ParisKV}
    for twin in (
        eval(repr(config), names),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config.replace(),
    ):
        assert twin == config
        assert hash(twin) == hash(config)
        assert repr(twin) == repr(config)
    assert pickle.loads(pickle.dumps(config.policy)) == config.policy


@pytest.mark.parametrize("field", CHANGED)
def test_configs_that_differ_in_one_field_differ(field):
    other = {"device": "cuda", "dtype": "float32", "layers": 4, "query_heads": 9, "head_dim": 64}
    other |= {"kv_heads": 1, "scorer": "sign_norm", "group_rule": "attention_mass", "seed": 1}
    other |= {"schedule": [(0, 0.05, 0.25)], "segment_tokens": 256, "value_dim": 64}
    other |= {"kv_dtype": "auto"}
    value = other.get(field, CHANGED[field] + 1 if field not in other else None)
    changed = {**CHANGED, "kv_dtype": "auto"} if field == "device" else CHANGED
    assert config_of(**changed) != config_of(**{**changed, field: value})


@pytest.mark.parametrize("block", [0, 64, 128, 256])
def test_blocks_of_these_sizes(block):
    config = config_of(**MODEL, block=block)
    assert config.policy.block == block
    assert f"block={block}" in repr(config)
    assert (config == pk.Config(**MODEL)) == (block == 64)
    with pk.Cache(make_config(block=block, segment_tokens=256)) as cache:
        assert cache.config.policy.block == block


def test_votes_are_of_whole_keys():
    for scorer, block, tail in (("sign_norm", 128, "sample"), ("votes", 0, "none")):
        config = make_config(block=128, scorer=scorer, tail="own", segment_tokens=128)
        with pk.Cache(config) as cache:
            assert cache.config.policy.block == block
            assert cache.config.policy.tail == tail


def test_a_config_equals_nothing_but_configs():
    config = pk.Config(**MODEL)
    assert config != "config"
    assert config != config.policy
    assert config not in (None, 7)


def test_replace_changes_and_checks_the_named_fields():
    config = pk.Config(**MODEL)
    changed = config.replace(local=64, policy=pk.ParisKV(top_k=7))
    assert (changed.local, changed.policy.top_k, changed.layers) == (64, 7, 32)
    assert config.local == 256
    assert config.policy.replace(top_k=9).top_k == 9
    with pytest.raises(ValueError, match="update"):
        config.replace(update=0)
    with pytest.raises(TypeError):
        config.replace(rows=3)


def test_regions_that_are_left_out_are_the_policys():
    left_out, named = pk.Config(**MODEL), pk.Config(**MODEL, sink=4, local=256, update=512)
    assert (left_out.sink, left_out.local, left_out.update) == (4, 256, 512)
    assert "sink=-1" in repr(left_out)
    assert "sink=4" in repr(named)
    with pk.Cache(named.replace(layers=1, sink=-1)) as cache:
        assert cache.config == named.replace(
            layers=1,
            dense_below=4096,
            segment_tokens=1024,
            value_dim=128,
            policy=pk.ParisKV(tail="sample", schedule=pk.ParisKV().schedule),
        )


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:3"])
def test_a_device_of_torch_is_understood(name):
    expected = "cuda:0" if name == "cuda" else name
    assert pk.Config(**MODEL, device=torch.device(name)).device == expected


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float32", "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
    ],
)
def test_dtypes_of_other_libraries_are_understood(given, name):
    assert pk.Config(**MODEL, dtype=given).dtype == name


def test_fields_cannot_be_assigned():
    config = make_config()
    with pytest.raises(AttributeError):
        config.policy.top_k = 5
    with pytest.raises(AttributeError):
        config.layers = 5


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size_up_to_16(head_dim, group):
    config = make_config(head_dim=head_dim, kv_heads=2, query_heads=2 * group)
    assert config.query_heads == 2 * group


def test_one_kv_head_may_serve_any_number():
    assert make_config(kv_heads=1, query_heads=71).query_heads == 71


WRONG = [
    ({"layers": 0}, "layers"),
    ({"layers": -1}, "layers"),
    ({"query_heads": 0}, "query_heads"),
    ({"kv_heads": 0}, "kv_heads"),
    ({"kv_heads": -2}, "kv_heads"),
    ({"query_heads": 5, "kv_heads": 2}, "query_heads.* 5"),
    ({"query_heads": 34, "kv_heads": 2}, "query_heads.* 34"),
    ({"head_dim": 0}, "head_dim.* 0"),
    ({"head_dim": 72}, "head_dim.* 72"),
    ({"head_dim": 320}, "head_dim: expected 64, .* 256 or 512, got 320"),
    ({"value_dim": 72}, r"\[config\] value_dim: expected 0 \(head_dim\), 64, .* or 512, got 72"),
    ({"value_dim": -64}, "value_dim.* -64"),
    ({"head_dim": 512, "scorer": "votes"}, r"policy.scorer: expected sign_norm .* votes"),
    ({"dtype": "float64"}, "dtype.*float64"),
    ({"dtype": "int8"}, "dtype.*int8"),
    ({"dtype": torch.float64}, "dtype.*float64"),
    ({"sink": -2}, "sink.* -2"),
    ({"local": -2}, "local.* -2"),
    ({"update": 0}, "update.* 0"),
    ({"top_k": 0}, "top_k.* 0"),
    ({"dense_below": -2}, "dense_below.* -2"),
    ({"scorer": "sign"}, "scorer.*sign_norm.*votes.*sign"),
    ({"group_rule": "mean"}, "group_rule.*attention_mass.*mean_query.*mean"),
    ({"schedule": []}, "schedule"),
    ({"schedule": [(0, 0.0, 0.5)]}, "schedule.*candidate_ratio"),
    ({"schedule": [(0, 1.01, 0.5)]}, "schedule.*candidate_ratio.*1.01"),
    ({"schedule": [(0, math.nan, 0.5)]}, "schedule.*candidate_ratio.*nan"),
    ({"schedule": [(0, 0.5, -0.5)]}, "schedule.*vote_ratio.*-0.5"),
    ({"schedule": [(0, 0.5, math.inf)]}, "schedule.*vote_ratio.*inf"),
    ({"schedule": [(5, 0.5, 0.5), (5, 0.2, 0.2)]}, "schedule.*from_tokens"),
    ({"schedule": [(-1, 0.5, 0.5)]}, "schedule.*from_tokens.*-1"),
    ({"min_candidates_per_row": 0}, "min_candidates_per_row.* 0"),
    ({"block": 1}, r"policy.block: expected 64, 128 or 256 .*, or 0 for none, got 1"),
    ({"block": 32}, "policy.block.* got 32"),
    ({"block": -64}, "policy.block.* got -64"),
    ({"block": 512, "segment_tokens": 512}, "policy.block.* got 512"),
    ({"block": 128, "segment_tokens": 64}, r"segment_tokens: .* policy.block \(128\), got 64"),
    ({"block": 256, "segment_tokens": 384}, r"segment_tokens.* \(256\), got 384"),
    ({"device": "tpu"}, "device.*tpu"),
    ({"device": "cuda:"}, "device.*cuda:"),
    ({"threads": -1}, "threads.* -1"),
    ({"row_cache": -2}, "row_cache.* -2"),
    ({"kv_dtype": "int4"}, "kv_dtype.*auto.*int8.*int4"),
    ({"segment_tokens": 0}, "segment_tokens.* 0"),
    ({"segment_tokens": 100}, "segment_tokens.* 100"),
    ({"memory_budget": -1}, "memory_budget.* -1"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_settings_that_do_not_fit_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_config(**changes)


HUGE = [
    "layers",
    "query_heads",
    "kv_heads",
    "local",
    "top_k",
    "row_cache",
    "segment_tokens",
    "threads",
]


@pytest.mark.parametrize("field", HUGE)
def test_sizes_that_would_overflow_are_refused(field):
    # A size near 2^62 would wrap in the products that follow from it.
    with pytest.raises(ValueError, match=r"expected"):
        make_config(**{field: 2**62})


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1.5},
        {"layers": "many"},
        {"layers": None},
        {"schedule": 0.5},
        {"rows": 3},
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_a_type_error(changes):
    with pytest.raises(TypeError):
        make_config(**changes)


@pytest.mark.parametrize("changes", [{"seed": -1}, {"seed": 2**64}, {"sink": 2**64}], ids=str)
def test_numbers_that_no_field_holds_are_a_value_error(changes):
    with pytest.raises(ValueError, match="expected an integer of 64 bits"):
        make_config(**changes)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        pk.Config(1, 4, 2, 64)


@pytest.mark.parametrize("policy", ["pariskv", 7, {"top_k": 5}], ids=str)
def test_a_policy_is_an_object_of_its_class(policy):
    with pytest.raises(TypeError):
        pk.Config(**MODEL, policy=policy)


def test_settings_of_a_policy_are_not_the_configs():
    with pytest.raises(TypeError):
        pk.Config(**MODEL, top_k=5)


def test_a_fixed_ratio_is_a_schedule_of_one_step():
    config = pk.Config(**MODEL, policy=pk.ParisKV(schedule=[(0, 0.05, 0.25)]))
    assert [tuple(step) for step in config.policy.schedule] == [(0, 0.05, 0.25)]


def test_a_backend_that_is_not_there_is_refused():
    assert pk.is_built("cpu")
    assert pk.is_available("cpu")
    if pk.is_available("cuda"):
        pytest.skip("there is a CUDA device")
    how = "there is no CUDA device, or no driver" if pk.is_built("cuda") else "install the CUDA"
    with pytest.raises(ValueError, match=rf"device: expected cpu, got cuda:0; .*{how}"):
        pk.Cache(make_config(device="cuda"))


def test_a_gpu_that_torch_uses_is_there_for_us_too():
    if not (pk.is_built("cuda") and torch.cuda.is_available()):
        pytest.skip("needs a build with the CUDA backend, and a torch that sees a GPU")
    assert pk.is_available("cuda"), "the tests of the CUDA backend would be left out unnoticed"


def test_asking_for_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        pk.is_built("tpu")


def test_the_cpu_level_has_a_name():
    assert pk.cpu_level() in ("plain", "avx2", "avx512")
