"""A GPU and the processes, devices and libraries around it: what goes wrong says so, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    child_environment,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    unchanged,
)

pytestmark = pytest.mark.cuda


def child(program: str, *, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


# --- Devices -----------------------------------------------------------------------------------


def test_the_backend_is_there():
    assert pk.is_built("cuda") and pk.is_available("cuda")
    assert pk.Cache(make_config()).config.device == "cuda:0"


def test_a_device_that_is_not_there_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"device: expected cuda:0 to cuda:{count - 1}, got"):
        pk.Cache(make_config(device=f"cuda:{count + 6}"))


def test_tensors_of_the_wrong_device_are_refused():
    on_gpu, on_cpu = filled(make_config(), 100), filled(make_config(device="cpu"), 100)
    for f, other, mine, theirs in (
        (on_gpu, on_cpu, "cuda:0", "cpu"),
        (on_cpu, on_gpu, "cpu", "cuda:0"),
    ):
        config = f.cache.config
        right = randn_step(f.rng, 1, config)
        wrong = randn_step(f.rng, 1, other.cache.config)
        sentence = rf"expected .* on {mine}, got .* on {theirs}"
        for i in range(3):
            mixed = [*right[:i], wrong[i], *right[i + 1 :]]
            with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
                f.cache.decode(0, [f.s], *mixed)
        with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
            f.cache.decode(0, [f.s], *right, out=wrong[0].clone())
        with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
            f.cache.prefill(0, [f.s], right[1], wrong[2])
        with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
            f.cache.attend(0, [f.s], wrong[0])
        with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
            f.cache.read(0, f.s, 0, 1, out=(wrong[1], wrong[2]))
        bias = torch.zeros(4, device=other.cache.config.device)
        with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
            f.cache.decode(0, [f.s], *right, sink_bias=bias)
        f.cache.decode(0, [f.s], *right)


def test_numpy_is_refused_with_a_sentence():
    f = filled(make_config(), 100)
    q = np.ones((1, 4, 64), np.float32)
    with unchanged(f.cache), pytest.raises(ValueError, match=r"on cuda:0, got .* on cpu"):
        f.cache.attend(0, [f.s], q)


def test_pinned_memory_is_the_hosts():
    f = filled(make_config(), 100)
    pinned = torch.ones(1, 4, 64, device="cpu").pin_memory()
    with unchanged(f.cache), pytest.raises(ValueError, match=r"on cuda:0, got .* on cpu"):
        f.cache.attend(0, [f.s], pinned)


def test_advance_is_for_gpus():
    cache = pk.Cache(make_config(device="cpu"))
    with pytest.raises(ValueError, match=r"\[advance\] expected a cache on a GPU"):
        cache.advance([cache.add()])


# --- Afterwards --------------------------------------------------------------------------------


def test_results_outlive_the_cache():
    config = make_config()
    f, twin = filled(config, 300), filled(config, 300)
    step = randn_step(f.rng, 1, config)
    torch.cuda._sleep(20_000_000)
    out = f.cache.decode(0, [f.s], *step)
    f.cache.close()  # while the step is still to come
    assert_same_bits(out, twin.cache.decode(0, [twin.s], *step))
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        f.cache.advance([f.s])


def test_closing_while_rows_are_under_way():
    config = make_config(head_dim=128)
    for _ in range(5):
        torch.cuda._sleep(10_000_000)
        f = filled(config, 2000)
        f.cache.close()
    torch.cuda.synchronize()


def test_another_cache_does_not_notice():
    config = make_config()
    f, twin = filled(config, 300), filled(config, 300)
    for seed in range(3):
        neighbour = filled(config, 700, seed)
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
        neighbour.cache.close()
    q = randn_q(f.rng, 1, config)
    assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q))


def test_inputs_may_be_freed_after_the_call():
    # torch hands memory on in stream order, and so it is with calls on the current stream.
    config = make_config()
    f, twin = filled(config, 100), filled(config, 100)
    for i in range(30):
        k, v = randn_kv(np.random.default_rng(i), 50, config)
        twin.cache.prefill(0, [twin.s], k, v)
        f.cache.prefill(0, [f.s], k.clone(), v.clone())
        torch.full((50, 2, 64), float("nan"))
    q = randn_q(f.rng, 1, config)
    assert_same_bits(f.cache.attend(0, [f.s], q), twin.cache.attend(0, [twin.s], q))


# --- Processes ---------------------------------------------------------------------------------


SETUP = """
    import os, sys, threading
    import torch
    import pariskv_core as pk
    config = pk.Config(layers=2, query_heads=2, kv_heads=1, head_dim=64, dtype="float32",
                       dense_below=0, local=16, segment_tokens=64, device="cuda",
                       policy=pk.ParisKV(top_k=4))
    cache = pk.Cache(config)
    s = cache.add()
    k = torch.randn(500, 1, 64, device="cuda")
    q = torch.randn(1, 2, 64, device="cuda")
    def step():
        return [cache.decode(layer, [s], q, k[:1], k[:1]) for layer in range(2)]
    for layer in range(2):
        cache.prefill(layer, [s], k, k)
    step()
"""
ENDINGS = {
    "just ends": "",
    "with a graph": (
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n    step()\n"
        "cache.advance([s])\ngraph.replay()"
    ),
    "del": "del cache, step",
    "close": "cache.close()",
    "in a cycle": "x = [cache]; x.append(x); del x, cache, step",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "kept by a module": "sys.kept = cache",
    "rows under way": "torch.cuda._sleep(100_000_000); cache.prefill(0, [s], k, k)",
    "a thread that ends": "t = threading.Thread(target=step); t.start(); t.join()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_process_ends_without_a_word(ending):
    done = child(textwrap.dedent(SETUP) + ending)
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(
    "deed", ["cache.close()", "step()", "cache.stats()", "cache.remove(s)", "pass"]
)
def test_a_forked_child_cannot_use_the_gpu_and_does_not_crash(deed):
    # CUDA does not survive a fork: the child may be told so, and must end like any other.
    program = textwrap.dedent(SETUP) + textwrap.dedent(f"""
        import warnings
        warnings.simplefilter("ignore")
        expected = step()
        cache.truncate([s], drop=1)
        pid = os.fork()
        if pid == 0:
            try:
                {deed}
            except (RuntimeError, ValueError, MemoryError):
                pass
            del cache
            os._exit(0)
        import signal, time
        deadline = time.monotonic() + 20
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                status = -1
                break
            time.sleep(0.01)
        same = all(bool((a == b).all()) for a, b in zip(step(), expected))
        print(status, same)
    """)
    assert child(program).stdout.strip() == "0 True"


def test_works_without_torch():
    program = """
        import sys
        sys.modules["torch"] = None  # what a missing library looks like to import
        import pariskv_core as pk
        config = pk.Config(layers=1, query_heads=2, kv_heads=1, head_dim=64, dtype="float32",
                           device="cuda")
        with pk.Cache(config) as cache:
            s = cache.add()
            cache.flush()
            print(cache.length(s), cache.stats().sequences, cache.fork(s))
            try:
                cache.read(0, s, 0, 0)
            except TypeError as error:
                print("PyTorch" in str(error))
            cache.remove(s)
        print("torch" in sys.modules and sys.modules["torch"] is not None)
    """
    assert child(program).stdout.split("\n")[:3] == ["0 1 1", "True", "False"]


def test_other_libraries_arrays():
    cupy = pytest.importorskip("cupy")
    config = make_config()
    f, twin = filled(config, 300), filled(config, 300)
    q, k, v = randn_step(f.rng, 1, config)
    expected = twin.cache.decode(0, [twin.s], q, k, v)
    torch.cuda.synchronize()
    out = cupy.zeros((1, 4, 64), cupy.float32)
    cupy.cuda.Device().synchronize()
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    assert f.cache.decode(0, [f.s], *arrays, out=out) is out
    torch.cuda.synchronize()
    assert_same_bits(cupy.asnumpy(out), expected)


def test_importing_does_not_touch_the_gpu():
    program = """
        import pariskv_core as pk
        config = pk.Config(layers=1, query_heads=2, kv_heads=1, head_dim=64, device="cuda")
        print(any("libcuda" in line for line in open("/proc/self/maps")))
    """
    assert child(program).stdout.strip() == "False"
