"""Wrong arguments: the right exception, a sentence that names them, and a cache as it was."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    Filled,
    assert_same_bits,
    assert_same_sequence,
    filled,
    make_config,
    randn_q,
    randn_step,
    unchanged,
)

BOTH = (ValueError, TypeError)


def scene() -> Filled:
    """Two layers, so that there is a layer that a failing call has not come to yet."""
    return filled(make_config(layers=2), 300)


def rows(tokens=1, heads=2, dim=64, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(tokens, heads, dim, dtype=dtype)


def queries(batch=1, heads=4, dim=64, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(batch, heads, dim, dtype=dtype)


def frozen() -> np.ndarray:
    array = np.ones((1, 4, 64), np.float32)
    array.flags.writeable = False
    return array


NAN, INF = float("nan"), float("inf")
HALF, BRAIN, DOUBLE = torch.float16, torch.bfloat16, torch.float64

# (what to change in a call that is right, exception, what the sentence must have).
DECODE = [
    (
        {"q": queries(heads=5)},
        ValueError,
        r"q: expected \(1, 4, 64\) float32 on (cpu|cuda:0), got \(1, 5, 64\)",
    ),
    ({"q": queries(batch=2)}, ValueError, r"q: expected \(1, 4, 64\).*got \(2, 4, 64\)"),
    ({"q": torch.ones(4, 64)}, ValueError, r"q: expected \(1, 4, 64\).*got \(4, 64\)"),
    ({"q": torch.tensor(1.0)}, ValueError, r"q: expected \(1, 4, 64\)"),
    ({"q": torch.ones(1, 1, 1, 1, 4, 64)}, ValueError, "q: expected"),
    ({"q": queries(dtype=HALF)}, BOTH, "q: expected .*float32.*got .*float16"),
    ({"q": queries(dtype=DOUBLE)}, BOTH, "q: expected .*float32.*got .*float64"),
    ({"q": queries(dtype=torch.complex64)}, BOTH, "q: expected .*float32.*got .*complex"),
    ({"k": rows(heads=3)}, ValueError, r"k: expected \(1, 2, 64\).*got \(1, 3, 64\)"),
    ({"k": rows(2)}, ValueError, r"k: expected \(1, 2, 64\).*got \(2, 2, 64\)"),
    ({"k": rows(0)}, ValueError, r"k: expected \(1, 2, 64\).*got \(0, 2, 64\)"),
    ({"k": torch.ones(1, 2, 128)[:, :, ::2]}, ValueError, "k: expected .*stride"),
    ({"k": rows(dtype=torch.int32)}, BOTH, "k: expected .*float32.*got .*int32"),
    ({"k": [[1.0] * 64] * 2}, TypeError, "k: expected .*array.*got list"),
    ({"k": None}, TypeError, "k: expected .*array.*got NoneType"),
    ({"v": rows(dim=63)}, ValueError, r"v: expected \(1, 2, 64\).*got \(1, 2, 63\)"),
    ({"v": object()}, TypeError, "v: expected .*array.*got object"),
    ({"out": queries(2)}, ValueError, r"out: expected \(1, 4, 64\).*got \(2, 4, 64\)"),
    ({"out": queries(dtype=BRAIN)}, BOTH, "out: expected .*float32.*got .*bfloat16"),
    ({"out": torch.ones(1, 4, 128)[..., ::2]}, ValueError, "out: expected .*stride"),
    ({"out": frozen()}, BOTH, "out: expected .*(writable|written)"),
    ({"out": torch.ones(1, 1, 64).expand(1, 4, 64)}, ValueError, "out: expected .*own address"),
    ({"scale": NAN}, ValueError, "scale: expected .*got -?nan"),
    ({"scale": 0.0}, ValueError, "scale: expected a positive number, got 0"),
    ({"scale": -0.2}, ValueError, "scale: expected a positive number, got -0.2"),
    ({"scale": 1e300}, ValueError, "scale: expected a positive number, got 1e"),
    ({"scale": INF}, ValueError, "scale: expected .*got inf"),
    ({"scale": "1"}, TypeError, "scale: expected a number, got str"),
    ({"softcap": [1]}, TypeError, "softcap: expected a number, got list"),
    ({"return_lse": 1}, TypeError, "return_lse: expected True or False, got int"),
    ({"stream": "0"}, TypeError, "stream: expected a stream's handle.*, got str"),
    ({"stream": -1}, ValueError, "stream: expected a stream's handle.*, got -1"),
    ({"layer": "x"}, TypeError, "layer: expected an integer, got str"),
    ({"layer": 0.0}, TypeError, "layer: expected an integer, got float"),
    ({"layer": 2**70}, ValueError, "layer: expected an integer of 64 bits, got 1180591620717411"),
    ({"sequences": "0"}, TypeError, "sequences: expected a list of integers, got str"),
    ({"sequences": {0}}, TypeError, "sequences: expected a list of integers, got set"),
    ({"sequences": None}, TypeError, "sequences: expected a list of integers, got NoneType"),
    ({"window": 3}, TypeError, "window: there is no such argument; .* layer, sequences, q, k, v"),
    ({"softcap": -1.0}, ValueError, "softcap: expected .*got -1"),
    ({"softcap": NAN}, ValueError, "softcap: expected .*got -?nan"),
    ({"softcap": INF}, ValueError, "softcap: expected .*got inf"),
    ({"sink_bias": torch.ones(3)}, ValueError, r"sink_bias: expected \(4,\) float32.*got \(3,\)"),
    (
        {"sink_bias": torch.ones(4, dtype=BRAIN)},
        BOTH,
        "sink_bias: expected .*float32.*got .*bfloat16",
    ),
    ({"sink_bias": torch.ones(8)[::2]}, ValueError, "sink_bias: expected .*stride"),
    ({"layer": 2}, ValueError, "layer: expected 0 to 1, got 2"),
    ({"layer": -1}, ValueError, "layer: expected 0 to 1, got -1"),
    ({"layer": 2**40}, ValueError, "layer: expected 0 to 1, got 1099511627776"),
    ({"sequences": [77]}, ValueError, "sequences: .*77"),
    ({"sequences": [0, 0]}, ValueError, "sequences: expected each once"),
    ({"sequences": 0}, TypeError, "sequences: expected a list of integers, got int"),
]
PREFILL = [
    ({"k": rows(5, 3)}, ValueError, r"k: expected \(5, 2, 64\).*got \(5, 3, 64\)"),
    ({"v": rows(4)}, ValueError, r"v: expected \(5, 2, 64\).*got \(4, 2, 64\)"),
    ({"v": rows(5, dtype=BRAIN)}, BOTH, "v: expected .*float32.*got .*bfloat16"),
    ({"k": torch.ones(5, 2, 128)[..., ::2]}, ValueError, "k: expected .*stride"),
    ({"k": np.ones((5, 2, 64), np.float32)[..., ::-1]}, ValueError, "k: expected .*stride"),
    ({"k": np.ones((5, 2, 64))}, BOTH, "k: expected .*float32.*got .*float64"),
    ({"k": "keys"}, TypeError, "k: expected .*array.*got str"),
    ({"q": queries(4)}, ValueError, r"q: expected \(5, 4, 64\).*got \(4, 4, 64\)"),
    ({"q": queries(5, heads=2)}, ValueError, r"q: expected \(5, 4, 64\).*got \(5, 2, 64\)"),
    ({"q": queries(5, dtype=HALF)}, BOTH, "q: expected .*float32.*got .*float16"),
    ({"q": torch.ones(5, 4, 128)[..., ::2]}, ValueError, "q: expected .*stride"),
    ({"q": "queries"}, TypeError, "q: expected .*array.*got str"),
    ({"lengths": [4]}, ValueError, r"k: expected \(4, 2, 64\).*got \(5, 2, 64\)"),
    ({"lengths": [-5]}, ValueError, "lengths: expected 0 or more.*got -5"),
    ({"lengths": [2**62]}, ValueError, "expected at most .* tokens.*got 4611686018427387904"),
    ({"lengths": [2, 3]}, ValueError, "lengths: expected one .*1 sequences, got 2"),
    ({"lengths": []}, ValueError, "lengths: expected one .*1 sequences, got 0"),
    ({"lengths": [2.5]}, TypeError, "lengths: expected integers alone in the list, got float"),
    ({"lengths": 5}, TypeError, "lengths: expected a list of integers, got int"),
    ({"layer": 9}, ValueError, "layer: expected 0 to 1, got 9"),
    ({"sequences": [-3]}, ValueError, "sequences: .*-3"),
    ({"sequences": [0, 0], "lengths": [2, 3]}, ValueError, "sequences: expected each once"),
]
ATTEND = [
    ({"q": queries(301)}, ValueError, "lengths: expected at most .*300.*got 301"),
    ({"lengths": [2]}, ValueError, r"q: expected \(2, 4, 64\).*got \(3, 4, 64\)"),
    ({"lengths": [-1]}, ValueError, "lengths: expected 0 or more.*got -1"),
    ({"out": queries(3, 3)}, ValueError, r"out: expected \(3, 4, 64\).*got \(3, 3, 64\)"),
    ({"scale": NAN}, ValueError, "scale: expected .*nan"),
    ({"sequences": [44]}, ValueError, "sequences: .*44"),
    ({"layer": 2}, ValueError, "layer: expected 0 to 1, got 2"),
    ({"k": rows(3)}, TypeError, "v: expected an array as for k, or neither, got NoneType"),
    ({"k": rows(3), "v": rows(2)}, ValueError, r"v: expected \(3, 2, 64\).*got \(2, 2, 64\)"),
    ({"k": rows(3, 3), "v": rows(3)}, ValueError, r"k: expected \(3, 2, 64\).*got \(3, 3, 64\)"),
    ({"lengths": [2], "k": rows(2), "v": rows(2)}, ValueError, r"q: expected \(2, 4, 64\)"),
]
EXPLAIN = [
    ({"q": queries()}, ValueError, r"q: expected \(4, 64\).*got \(1, 4, 64\)"),
    ({"layer": 5}, ValueError, "layer: expected 0 to 1, got 5"),
    ({"sequence": 99}, ValueError, "sequences: .*99"),
    ({"softcap": NAN}, ValueError, "softcap: expected .*nan"),
]
READ = [
    ({"end": 301}, ValueError, "expected .*300.*301"),
    ({"begin": -1}, ValueError, "expected .*-1"),
    ({"begin": 5, "end": 3}, ValueError, "expected .*5.*3"),
    ({"out": (rows(2), rows(3))}, ValueError, r"v: expected \(2, 2, 64\).*got \(3, 2, 64\)"),
    ({"out": (rows(3), rows(2))}, ValueError, "expected .*2.*3"),
    ({"out": (rows(2),)}, BOTH, "out: expected"),
    ({"sequence": 44}, ValueError, "44"),
    ({"layer": 2}, ValueError, "layer: expected 0 to 1, got 2"),
]
OTHER = {
    "summaries": [
        ({"layer": 0, "sequence": 99}, ValueError, "99"),
        ({"layer": 2, "sequence": 0}, ValueError, "layer: expected 0 to 1, got 2"),
    ],
    "truncate": [
        ({"drop": [301]}, ValueError, "drop: expected 0 to 300, .*sequence 0, got 301"),
        ({"drop": -1}, ValueError, "drop: expected 0 to 300, .* got -1"),
        ({"keep": [301]}, ValueError, "keep: expected 0 to 300, .* got 301"),
        ({"keep": -1}, ValueError, "keep: expected 0 to 300, .* got -1"),
        ({"drop": [1, 1]}, ValueError, "drop: expected one .*1 sequences, got 2"),
        ({"keep": []}, ValueError, "keep: expected one .*1 sequences, got 0"),
        ({}, ValueError, "expected one of drop and keep"),
        ({"drop": 1, "keep": 1}, ValueError, "expected one of drop and keep"),
        ({"drop": "1"}, TypeError, "drop: expected an integer or a list of integers, got str"),
        ({"keep": 1.5}, TypeError, "keep: expected an integer or a list of integers, got float"),
        ({"sequences": [44], "drop": 1}, ValueError, "44"),
        ({"sequences": [0, 0], "drop": 1}, ValueError, "sequences: expected each once"),
    ],
    "fork": [
        ({"sequence": 44}, ValueError, "44"),
        ({"sequence": [0]}, TypeError, "sequence: expected an integer, got list"),
        ({}, TypeError, "sequence: expected, and not given"),
    ],
    "remove": [
        ({"sequence": 44}, ValueError, "44"),
        ({}, TypeError, "sequence: expected, and not given"),
    ],
    "save": [({"sequence": "a", "path": "x"}, TypeError, "sequence: expected an integer, got str")],
    "load": [({"path": 3}, TypeError, "path: expected str, bytes or os.PathLike, got int")],
    "flush": [
        ({"sequences": [0, 44]}, ValueError, "44"),
        ({"sequences": [0, 0]}, ValueError, "sequences: expected each once"),
    ],
    "reorder": [
        ({"sequences": [0], "source": [0, 0]}, ValueError, "source: expected one .*got 2"),
        ({"sequences": [0], "source": [1]}, ValueError, "source: expected .*got 1"),
        ({"sequences": [0], "source": [-1]}, ValueError, "source: expected .*got -1"),
        ({"sequences": [0, 0], "source": [0, 0]}, ValueError, "each once"),
    ],
    "length": [
        ({"sequence": 44}, ValueError, "44"),
        ({"sequence": 0, "layer": 2}, ValueError, "layer: expected 0 to 1, got 2"),
    ],
    "regions": [
        ({"sequence": 44}, ValueError, "44"),
        ({"sequence": 0, "layer": -1}, ValueError, "layer: expected 0 to 1, got -1"),
    ],
}
RIGHT = {
    "decode": {"layer": 0, "sequences": [0], "q": queries(), "k": rows(), "v": rows()},
    "prefill": {"layer": 0, "sequences": [0], "k": rows(5), "v": rows(5)},
    "attend": {"layer": 0, "sequences": [0], "q": queries(3)},
    "truncate": {"sequences": [0]},
    "explain": {"layer": 0, "sequence": 0, "q": torch.ones(4, 64)},
    "read": {"layer": 0, "sequence": 0, "begin": 0, "end": 2},
}
TABLES = {
    "decode": DECODE,
    "prefill": PREFILL,
    "attend": ATTEND,
    "explain": EXPLAIN,
    "read": READ,
    **OTHER,
}
WRONG = [(verb, *case) for verb, table in TABLES.items() for case in table]


def named(case: tuple) -> str:
    verb, changes, _, sentence = case
    return f"{verb}({', '.join(changes)}) {sentence[:40]}"


def moved(value, device: str):
    """The same argument on the device; tensors here are all ones, so the layout is what counts."""
    if isinstance(value, tuple):
        return tuple(moved(x, device) for x in value)
    if not isinstance(value, torch.Tensor) or device == "cpu":
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    storage = torch.ones(elements, dtype=value.dtype, device=device)
    return storage.as_strided(value.size(), value.stride(), value.storage_offset())


@pytest.mark.parametrize("verb", sorted(RIGHT.keys() - {"truncate"}))  # which needs one more
def test_the_calls_to_be_spoiled_are_right(verb, device):
    f = scene()
    assert f.s == 0
    arguments = {name: moved(value, device) for name, value in RIGHT[verb].items()}
    getattr(f.cache, verb)(**arguments)


@pytest.mark.parametrize("case", WRONG, ids=map(named, WRONG))
def test_a_wrong_argument_is_refused_before_anything_changes(case, device):
    verb, changes, exception, sentence = case
    if device != "cpu" and any(isinstance(value, np.ndarray) for value in changes.values()):
        pytest.skip("NumPy's arrays are refused for lying in host memory")
    arguments = {**RIGHT.get(verb, {}), **changes}
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    f, twin = scene(), scene()
    sentence = rf"\[{verb}\] .*{sentence}"
    with unchanged(f.cache), pytest.raises(exception, match=sentence):
        getattr(f.cache, verb)(**arguments)
    probe = randn_q(f.rng, 1, f.cache.config)[0]
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, probe)
    step = randn_step(f.rng, 1, f.cache.config)
    assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))


def test_one_bad_sequence_keeps_the_whole_batch_out():
    f = scene()
    good = f.cache.add()
    gone = f.cache.add()
    f.cache.remove(gone)
    with unchanged(f.cache), pytest.raises(ValueError, match=str(gone)):
        f.cache.prefill(0, [good, gone], rows(4), rows(4), [2, 2])
    with unchanged(f.cache), pytest.raises(ValueError, match=str(gone)):
        f.cache.decode(0, [f.s, gone], queries(2), rows(2), rows(2))
    with unchanged(f.cache), pytest.raises(ValueError, match=r"\[prefill\] lengths: expected"):
        f.cache.prefill(0, [f.s, good], rows(4), rows(4))  # whose are they?
    other = pk.Cache(f.cache.config)
    with pytest.raises(ValueError, match=str(f.s)):
        other.decode(0, [f.s], queries(), rows(), rows())


def one_buffer(*shapes: tuple[int, ...], step: int) -> list[torch.Tensor]:
    """Tensors that begin `step` elements after each other."""
    room = torch.ones(4096)
    found = []
    for i, shape in enumerate(shapes):
        rows = room[i * step :]
        found.append(rows[: int(np.prod(shape))].view(shape))
    return found


@pytest.mark.parametrize("step", [1, 64, 127])
@pytest.mark.parametrize("other", ["q", "k", "v"])
@pytest.mark.cpu("views of one host tensor")
def test_an_output_that_overlaps_an_argument_is_refused(other, step):
    f = scene()
    shapes = {"q": (1, 4, 64), "k": (1, 2, 64), "v": (1, 2, 64)}
    buffers = one_buffer(shapes[other], (1, 4, 64), step=step)
    arguments = {**RIGHT["decode"], other: buffers[0], "out": buffers[1]}
    with (
        unchanged(f.cache),
        pytest.raises(ValueError, match=rf"\[decode\] out: expected memory .* part of {other}"),
    ):
        f.cache.decode(**arguments)


@pytest.mark.cpu("views of one host tensor")
def test_an_output_beside_or_between_its_arguments_is_taken():
    f, twin = scene(), scene()
    room = torch.randn(1, 12, 64)
    q, k, v, out = room[:, :4], room[:, 4:6], room[:, 6:8], room[:, 8:]
    expected = twin.cache.decode(0, [twin.s], q.clone(), k, v)
    assert_same_bits(f.cache.decode(0, [f.s], q, k, v, out=out), expected)
    assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q, out=q))
    # Rows of two tensors in turn: they share a range of addresses, and no byte.
    turns = torch.randn(4, 2, 4, 64)
    expected = twin.cache.attend(0, [twin.s], turns[:, 0].clone())
    assert_same_bits(f.cache.attend(0, [f.s], turns[:, 0], out=turns[:, 1]), expected)


@pytest.mark.cpu("views of one host tensor")
def test_read_does_not_write_values_over_keys():
    f = scene()
    both = torch.zeros(3, 2, 64)
    with pytest.raises(ValueError, match=r"\[read\] k: expected memory .* part of v"):
        f.cache.read(0, f.s, 0, 3, out=(both, both))


@pytest.mark.cpu("on a GPU nothing is read back for this")
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_a_sink_bias_that_is_no_number_is_refused(wrong):
    f = scene()
    bias = torch.tensor([0.0, -INF, wrong, 1.0])
    sentence = r"\[decode\] sink_bias: expected numbers.* got (nan|inf) for query head 2"
    with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
        f.cache.decode(**RIGHT["decode"], sink_bias=bias)
    bias[2] = -INF  # no sink at all
    f.cache.decode(**RIGHT["decode"], sink_bias=bias)


@pytest.mark.cpu("meta tensors stand in for another device; see test_cuda_process.py")
def test_memory_of_another_device_is_refused():
    f = scene()
    elsewhere = torch.ones(1, 4, 64, device="meta")
    with unchanged(f.cache), pytest.raises((ValueError, TypeError)):
        f.cache.decode(0, [f.s], elsewhere, rows(), rows())


CLOSED = {
    "config": lambda c, s: c.config,
    "add": lambda c, s: c.add(),
    "remove": lambda c, s: c.remove(s),
    "fork": lambda c, s: c.fork(s),
    "reorder": lambda c, s: c.reorder([s], [0]),
    "truncate": lambda c, s: c.truncate([s], drop=1),
    "flush": lambda c, s: c.flush(),
    "prefill": lambda c, s: c.prefill(0, [s], rows(), rows()),
    "decode": lambda c, s: c.decode(0, [s], queries(), rows(), rows()),
    "attend": lambda c, s: c.attend(0, [s], queries()),
    "explain": lambda c, s: c.explain(0, s, torch.ones(4, 64)),
    "summaries": lambda c, s: c.summaries(0, s),
    "read": lambda c, s: c.read(0, s, 0, 1),
    "length": lambda c, s: c.length(s),
    "regions": lambda c, s: c.regions(s),
    "sequences": lambda c, s: c.sequences(),
    "stats": lambda c, s: c.stats(),
    "enter": lambda c, s: c.__enter__(),
}


@pytest.mark.parametrize("call", CLOSED.values(), ids=CLOSED.keys())
def test_a_closed_cache_says_so(call):
    f = scene()
    f.cache.close()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        call(f.cache, f.s)
    f.cache.close()  # closing twice is fine


def test_a_cache_closes_itself_at_the_end_of_a_with_block():
    with pk.Cache(make_config()) as cache:
        assert isinstance(cache, pk.Cache)
        cache.add()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        cache.add()

    def fail() -> None:
        with pk.Cache(make_config()) as inner:
            caches.append(inner)
            raise KeyError

    caches: list[pk.Cache] = []
    with pytest.raises(KeyError):
        fail()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        caches[0].add()


def test_a_cache_is_made_from_a_config():
    with pytest.raises(TypeError):
        pk.Cache(None)
    with pytest.raises(TypeError):
        pk.Cache({"layers": 1})
