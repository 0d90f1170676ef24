"""Calls that fit no signature, numbers out of range, closed caches: a sentence with the name."""

import pariskv_core as pk
import pytest
from support import filled, make_config, unchanged


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: c.decode(0, [0]), r"\[decode\] q: expected, and not given"),
        (lambda c: c.remove(), r"\[remove\] sequence: expected, and not given"),
        (
            lambda c: c.remove(0, 1),
            r"\[remove\] expected at most 1 arguments without a name, got 2",
        ),
        (lambda c: c.length(0, sequence=0), r"\[length\] sequence: expected once, got it twice"),
        (lambda c: pk.Cache(), r"\[cache\] config: expected, and not given"),
        (lambda c: pk.Cache(3), r"\[cache\] config: expected a Config, got int"),
        (lambda c: pk.Config(layers=1), r"\[config\] query_heads: expected, and not given"),
        (lambda c: pk.Config(c.config), r"\[config\] expected every argument by its name: layers,"),
        (lambda c: c.config.replace(local="x"), r"\[config\] local: expected an integer, got str"),
        (lambda c: c.config.replace(placement=0), r"\[config\] placement: expected a string, got"),
        (lambda c: c.config.replace(policy=3), r"\[config\] policy: expected a policy's settings"),
        (
            lambda c: c.config.replace(unlike=3),
            r"\[config\] unlike: there is no such field; the fi",
        ),
        (lambda c: pk.ParisKV(top_k=2.5), r"\[config\] policy.top_k: expected an integer, got fl"),
        (lambda c: pk.ParisKV(schedule=3), r"\[config\] policy.schedule: expected a list or None"),
        (lambda c: pk.ParisKV(error="x"), r"\[config\] policy.error: expected a number or None"),
        (lambda c: pk.PRKV(static_share=[]), r"\[config\] policy.static_share: expected a numb"),
        (
            lambda c: pk.ParisKV(schedule=[1]),
            r"\[config\] policy.schedule: expected steps of three",
        ),
        (lambda c: pk.HardKV(p="all"), r"\[config\] policy.p: expected a number, got str"),
    ],
)
def test_arguments_that_fit_no_signature_are_told_by_name(call, sentence):
    cache = filled(make_config(), 300).cache
    with unchanged(cache), pytest.raises(TypeError, match=sentence):
        call(cache)


def test_a_number_out_of_its_range_is_told_by_name():
    with pytest.raises(ValueError, match=r"\[config\] policy.seed: expected an integer.*got -1"):
        pk.ParisKV(seed=-1)
    with pytest.raises(ValueError, match=r"\[config\] layers: expected an integer.*got 1267650600"):
        pk.Config(layers=2**100, query_heads=1, kv_heads=1, head_dim=64)


def test_a_closed_cache_is_refused_in_a_sentence():
    cache = filled(make_config(), 300).cache
    cache.close()
    with pytest.raises(ValueError, match="this cache is closed; make a new one"):
        cache.__enter__()
    with pytest.raises(ValueError, match="closed"), cache:
        pass
