"""Arrays of every library, in and out, without copies; and other threads while the engine works."""

import threading
import time

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    explained,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    unchanged,
)

in_host_memory = pytest.mark.cpu("NumPy's arrays lie in host memory")


class Producer:
    """An array of nobody's library: all it can do is hand over a DLPack capsule."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self.asked = 0

    def __dlpack__(self, *args, **kwargs):
        self.asked += 1
        return self._tensor.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def twins(dtype: str = "float32", tokens: int = 300, **changes):
    config = make_config(dtype=dtype, **changes)
    return filled(config, tokens), filled(config, tokens)


@in_host_memory
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_in_numpy_out(dtype):
    f, twin = twins(dtype)
    step = randn_step(f.rng, 1, f.cache.config)
    out, lse = f.cache.decode(0, [f.s], *(x.numpy() for x in step), return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    expected, expected_lse = twin.cache.decode(0, [twin.s], *step, return_lse=True)
    assert type(expected) is type(expected_lse) is torch.Tensor
    assert expected.dtype == getattr(torch, dtype)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    q = randn_q(f.rng, 3, f.cache.config)
    attended = f.cache.attend(0, [f.s], q.numpy())
    assert type(attended) is np.ndarray
    assert_same_bits(attended, twin.cache.attend(0, [twin.s], q))


@in_host_memory
def test_bfloat16_needs_an_array_type_with_bfloat16():
    f, _ = twins("bfloat16")
    step = randn_step(f.rng, 1, f.cache.config)
    out = f.cache.decode(0, [f.s], *step)
    assert out.dtype == torch.bfloat16
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        f.cache.read(0, f.s, 0, 10)
    # A producer of no known library cannot be given an output of its own kind: pass one.
    q, k, v = (Producer(x) for x in step)
    before = f.cache.length(f.s)
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        f.cache.decode(0, [f.s], q, k, v)
    assert f.cache.length(f.s) == before
    room = torch.empty_like(out)
    assert f.cache.decode(0, [f.s], q, k, v, out=room) is room


def test_any_dlpack_producer_is_an_array(dtype):
    f, twin = twins(dtype)
    step = randn_step(f.rng, 1, f.cache.config)
    wrapped = [Producer(x) for x in step]
    assert isinstance(wrapped[0], pk.Array)
    out = torch.empty_like(step[0])
    f.cache.decode(0, [f.s], *wrapped, out=Producer(out))
    assert all(x.asked >= 1 for x in wrapped)
    assert_same_bits(out, twin.cache.decode(0, [twin.s], *step))


@in_host_memory
def test_libraries_can_be_mixed_in_one_call():
    f, twin = twins()
    q, k, v = randn_step(f.rng, 1, f.cache.config)
    out = f.cache.decode(0, [f.s], q, k.numpy(), Producer(v))
    assert type(out) is torch.Tensor
    assert_same_bits(out, twin.cache.decode(0, [twin.s], q, k, v))


@in_host_memory
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_out_is_written_in_place_and_returned(library):
    f, twin = twins()
    q, k, v = randn_step(f.rng, 1, f.cache.config)
    out = torch.full_like(q, 7.0)
    given = out if library == "torch" else out.numpy()
    result = f.cache.decode(0, [f.s], q, k, v, out=given)
    assert result is given
    expected = twin.cache.decode(0, [twin.s], q, k, v)
    assert_same_bits(out, expected)
    result, lse = f.cache.attend(0, [f.s], q, out=given, return_lse=True)
    assert result is given
    assert lse.shape == (1, 4)


def test_out_may_be_a_window_on_something_larger():
    f, twin = twins()
    q, k, v = randn_step(f.rng, 1, f.cache.config)
    large = torch.full((3, 9, 70), 7.0)
    f.cache.decode(0, [f.s], q, k, v, out=large[1:2, 1::2, 3:67])
    assert_same_bits(large[1:2, 1::2, 3:67], twin.cache.decode(0, [twin.s], q, k, v))
    large[1:2, 1::2, 3:67] = 7.0
    assert (large == 7.0).all()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The layout (heads, tokens, dim) in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_third(x: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(3 * x.shape[0], *x.shape[1:], dtype=x.dtype)
    wide[1::3] = x
    return wide[1::3]


def inside_qkv(x: torch.Tensor) -> torch.Tensor:
    """Heads beside those of other projections, as one fused matrix product leaves them."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 5, x.shape[2], dtype=x.dtype)
    wide[:, 2 : 2 + x.shape[1]] = x
    return wide[:, 2 : 2 + x.shape[1]]


def backwards(x: torch.Tensor) -> np.ndarray:
    """Negative strides over tokens and heads; torch has none."""
    return np.ascontiguousarray(x.numpy()[::-1, ::-1])[::-1, ::-1]


@pytest.mark.parametrize("layout", [transposed, every_third, inside_qkv])
def test_strides_over_tokens_and_heads_are_taken_as_they_are(layout, dtype):
    f, twin = twins(dtype)
    k, v = randn_kv(f.rng, 100, f.cache.config)
    assert not layout(k).is_contiguous()
    f.cache.prefill(0, [f.s], layout(k), layout(v))
    twin.cache.prefill(0, [twin.s], k, v)
    q = randn_q(f.rng, 20, f.cache.config)
    expected = twin.cache.attend(0, [twin.s], q)
    assert_same_bits(f.cache.attend(0, [f.s], layout(q)), expected)
    out = layout(torch.zeros_like(q))
    f.cache.attend(0, [f.s], q, out=out)
    assert_same_bits(out, expected)
    step = randn_step(f.rng, 1, f.cache.config)
    assert_same_bits(
        f.cache.decode(0, [f.s], *(layout(x) for x in step)),
        twin.cache.decode(0, [twin.s], *step),
    )


@in_host_memory
def test_negative_strides():
    f, twin = twins()
    k, v = randn_kv(f.rng, 100, f.cache.config)
    f.cache.prefill(0, [f.s], backwards(k), backwards(v))
    twin.cache.prefill(0, [twin.s], k, v)
    q = randn_q(f.rng, 20, f.cache.config)
    assert_same_bits(f.cache.attend(0, [f.s], backwards(q)), twin.cache.attend(0, [twin.s], q))


def test_one_key_for_all_by_a_stride_of_zero():
    f, twin = twins()
    k, v = randn_kv(f.rng, 1, f.cache.config)
    f.cache.prefill(0, [f.s], k.expand(50, -1, -1), v.expand(50, -1, -1))
    twin.cache.prefill(0, [twin.s], k.repeat(50, 1, 1), v.repeat(50, 1, 1))
    q = randn_q(f.rng, 1, f.cache.config)
    assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q))


def frozen(x: torch.Tensor) -> np.ndarray:
    array = x.numpy().copy()
    array.flags.writeable = False
    return array


@in_host_memory
def test_read_only_arrays_are_for_reading():
    f, twin = twins()
    step = randn_step(f.rng, 1, f.cache.config)
    out = f.cache.decode(0, [f.s], *(frozen(x) for x in step))
    assert_same_bits(out, twin.cache.decode(0, [twin.s], *step))
    k, v = randn_kv(f.rng, 9, f.cache.config)
    f.cache.prefill(0, [f.s], frozen(k), frozen(v))
    with pytest.raises(
        (TypeError, ValueError), match=r"\[decode\] out: expected .*(writable|written)"
    ):
        f.cache.decode(0, [f.s], *step, out=frozen(step[0]))
    with pytest.raises(
        (TypeError, ValueError), match=r"\[attend\] out: expected .*(writable|written)"
    ):
        f.cache.attend(0, [f.s], step[0], out=frozen(step[0]))
    assert f.cache.length(f.s) == 310


def _wanting(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def _refusals(f) -> dict:
    """A call for each argument that is an array, which is one that requires a gradient."""
    config = f.cache.config
    q, k, v = randn_step(f.rng, 1, config)
    keys, values = randn_kv(f.rng, 9, config)
    bias = torch.zeros(config.query_heads, device=config.device)
    calls = {
        "prefill k": lambda: f.cache.prefill(0, [f.s], _wanting(keys), values),
        "prefill v": lambda: f.cache.prefill(0, [f.s], keys, torch.nn.Parameter(values)),
        "prefill q": lambda: f.cache.prefill(
            0, [f.s], keys, values, q=_wanting(q.expand(9, -1, -1))
        ),
        "read k": lambda: f.cache.read(0, f.s, 0, 1, out=(_wanting(k), v)),
        "read v": lambda: f.cache.read(0, f.s, 0, 1, out=(k, _wanting(v))),
        "explain q": lambda: f.cache.explain(0, f.s, _wanting(q[0])),
    }
    for verb, call in (("decode", f.cache.decode), ("attend", f.cache.attend)):
        calls |= {
            f"{verb} q": lambda call=call: call(0, [f.s], _wanting(q), k=k, v=v),
            f"{verb} k": lambda call=call: call(0, [f.s], q, k=_wanting(k), v=v),
            f"{verb} v": lambda call=call: call(0, [f.s], q, k=k, v=torch.nn.Parameter(v)),
            f"{verb} out": lambda call=call: call(0, [f.s], q, k=k, v=v, out=_wanting(q)),
            f"{verb} sink_bias": lambda call=call: call(
                0, [f.s], q, k=k, v=v, sink_bias=torch.nn.Parameter(bias)
            ),
        }
    return calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_tensors_that_require_a_gradient_are_refused(mode):
    f, twin = twins()
    for place, call in _refusals(f).items():
        verb, argument = place.split()
        expected = rf"\[{verb}\] {argument}: expected .* no gradient.*pass {argument}\.detach\(\)"
        with mode(), unchanged(f.cache), pytest.raises(ValueError, match=expected):
            call()
    step = randn_step(f.rng, 1, f.cache.config)
    out = f.cache.decode(0, [f.s], *(_wanting(x).detach() for x in step))
    assert_same_bits(out, twin.cache.decode(0, [twin.s], *step))


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_lists_may_be_any_sequence_of_numbers(kind):
    f, twin = twins()
    step = randn_step(f.rng, 1, f.cache.config)
    k, v = randn_kv(f.rng, 9, f.cache.config)
    f.cache.prefill(np.int64(0), kind([f.s]), k, v, kind([9]))
    twin.cache.prefill(0, [twin.s], k, v, [9])
    assert_same_bits(
        f.cache.decode(0, kind([f.s]), *step, scale=1, stream=0),
        twin.cache.decode(0, [twin.s], *step, scale=1.0),
    )


def test_inputs_are_not_written(dtype):
    f, _ = twins(dtype)
    step = randn_step(f.rng, 1, f.cache.config)
    copies = [x.clone() for x in step]
    f.cache.decode(0, [f.s], *step)
    for x, copy in zip(step, copies, strict=True):
        assert_same_bits(x, copy)


def test_inputs_may_be_changed_after_the_call():
    # Rows are copied in: nothing keeps looking at the caller's memory.
    f, twin = twins()
    k, v = randn_kv(f.rng, 100, f.cache.config)
    twin.cache.prefill(0, [twin.s], k, v)
    theirs = (k.clone(), v.clone())
    f.cache.prefill(0, [f.s], *theirs)
    for x in theirs:
        x.fill_(float("nan"))
    q = randn_q(f.rng, 1, f.cache.config)
    assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q))


def test_explanations_outlive_the_cache():
    f, twin = twins()
    q = randn_q(f.rng, 1, f.cache.config)[0]
    explanation, summaries = f.cache.explain(0, f.s, q), f.cache.summaries(0, f.s)
    positions, weights = explanation.positions, summaries.weights
    f.cache.close()
    del explanation, summaries, f
    again = twin.cache.explain(0, twin.s, q)
    assert_same_bits(positions, again.positions)
    assert_same_bits(weights, twin.cache.summaries(0, twin.s).weights)


@pytest.mark.parametrize(
    ("name", "dtype", "rows"),
    [
        ("coarse", np.uint8, 2),
        ("candidate_positions", np.int64, 2),
        ("positions", np.int64, 2),
        ("worth", np.float32, 2),
        ("estimated", np.float32, 4),
        ("exact", np.float32, 4),
    ],
)
def test_explanations_are_numpy(name, dtype, rows):
    f, _ = twins()
    array = explained(f.cache.explain(0, f.s, randn_q(f.rng, 1, f.cache.config)[0]))[name]
    assert type(array) is np.ndarray
    assert array.dtype == dtype
    assert array.shape[0] == rows
    assert array.ndim == 2


# --- Threads -----------------------------------------------------------------------------------


@pytest.mark.cpu("on a GPU the call returns before the work is done")
def test_other_threads_run_while_the_engine_works():
    config = make_config(threads=1, query_heads=8, head_dim=128)
    f = filled(config, 4000)
    q = randn_q(f.rng, 400, config)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    start = time.perf_counter()
    f.cache.attend(0, [f.s], q)
    end = time.perf_counter()
    done.set()
    other.join()
    during = [t for t in ticks if start < t < end]
    # With the GIL held there would be one tick at most; a busy machine may take many away.
    assert end - start > 0.03, "too quick to tell: ask for more queries"
    assert len(during) >= 5


def test_caches_of_different_threads_do_not_meet():
    config = make_config(threads=2)

    def steps(seed: int) -> list[torch.Tensor]:
        f = filled(config, 200, seed)
        return [f.cache.decode(0, [f.s], *randn_step(f.rng, 1, config)) for _ in range(60)]

    expected = [steps(seed) for seed in range(4)]
    results: dict[int, list[torch.Tensor]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: results.update({seed: steps(seed)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        for mine, theirs in zip(results[seed], expected[seed], strict=True):
            assert_same_bits(mine, theirs)


def test_threads_may_share_a_cache_and_take_turns():
    config = make_config(threads=2)
    shared, alone = pk.Cache(config), pk.Cache(config)
    inputs = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        inputs.append((randn_kv(rng, 200, config), [randn_step(rng, 1, config) for _ in range(60)]))

    def steps(cache: pk.Cache, seed: int) -> list[torch.Tensor]:
        s = cache.add()
        (k, v), rest = inputs[seed]
        cache.prefill(0, [s], k, v)
        return [cache.decode(0, [s], *step) for step in rest]

    expected = [steps(alone, seed) for seed in range(4)]
    results: dict[int, list[torch.Tensor]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: results.update({seed: steps(shared, seed)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        for mine, theirs in zip(results[seed], expected[seed], strict=True):
            assert_same_bits(mine, theirs)
    assert shared.stats().decode_tokens == 4 * 60


def test_closing_while_another_thread_is_inside():
    config = make_config(threads=1, query_heads=8, head_dim=128)
    f = filled(config, 3000)
    q = randn_q(f.rng, 200, config)
    expected = f.cache.attend(0, [f.s], q)
    results = []
    inside = threading.Thread(target=lambda: results.append(f.cache.attend(0, [f.s], q)))
    inside.start()
    time.sleep(0.01)
    f.cache.close()
    inside.join()
    assert_same_bits(results[0], expected)
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        f.cache.stats()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="needs PyTorch 2.10 or newer"
)
def test_tensors_of_torch_come_by_its_table_and_others_by_their_method(monkeypatch):
    f, twin = twins()
    step = randn_step(f.rng, 1, f.cache.config)
    # Rows apart from one another, from the middle of a tensor.
    apart = [torch.stack([x, x, x])[1:, :, :, :][:, 0].expand(2, *x.shape[1:])[1:] for x in step]
    expected = twin.cache.decode(0, [twin.s], *step)

    class Own(torch.Tensor):
        asked = 0

        def __dlpack__(self, *args, **kwargs):
            Own.asked += 1
            return torch.utils.dlpack.to_dlpack(self.as_subclass(torch.Tensor))

    def refuse(*args, **kwargs):
        raise AssertionError("PyTorch's Python was asked")

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    assert_same_bits(f.cache.decode(0, [f.s], *apart), expected)
    q, k, v = (x.as_subclass(Own) for x in randn_step(f.rng, 1, f.cache.config))
    f.cache.decode(0, [f.s], q, k, v, out=torch.empty_like(expected))
    assert Own.asked == 3
