"""Signals during long calls: answered at once, and the cache is as it was before the call."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pariskv_core as pk
import pytest
from support import child_environment

pytestmark = pytest.mark.cpu("work that a GPU was given goes on by itself")

# Far more than the promise of 0.2 s needs; a machine with other work is slow now and then.
ANSWER = 1.0

SCENE = """
    import os, signal, sys, threading, time
    import numpy as np
    import pariskv_core as pk

    def make(tokens=0, layers=1, **fields):
        config = pk.Config(layers=layers, query_heads=32, kv_heads=8, head_dim=128,
                           dtype="float16", threads=2, **fields)
        cache = pk.Cache(config)
        s = cache.add()
        for layer in range(layers if tokens else 0):
            k = np.resize(block, (tokens, 8, 128))
            cache.prefill(layer, [s], k, k)
        return cache, s

    rng = np.random.default_rng(0)
    block = rng.standard_normal((1024, 8, 128)).astype(np.float16)

    def interrupt_after(seconds, number=signal.SIGINT):
        def send():
            time.sleep(seconds)
            global sent
            sent = time.perf_counter()
            os.kill(os.getpid(), number)
        threading.Thread(target=send, daemon=True).start()

    def interrupted(call, exception=KeyboardInterrupt, after=0.15):
        interrupt_after(after)
        try:
            call()
        except exception:
            return time.perf_counter() - sent
        raise SystemExit("the call ended by itself")
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCENE) + textwrap.dedent(program)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CALLS = {
    "attend": """
        cache, s = make(8192)
        before = cache.stats().tokens
        q = np.resize(block, (8192, 32, 128))
        call = lambda: cache.attend(0, [s], q, [8192])
    """,
    "attend that appends": """
        cache, s = make(1024)
        before = cache.stats().tokens
        q, k = np.resize(block, (8192, 32, 128)), np.resize(block, (8192, 8, 128))
        call = lambda: cache.attend(0, [s], q, k=k, v=k)
    """,
    "prefill": """
        cache, s = make()
        before = 0
        k = np.resize(block, (1, 8, 128))
        k = np.lib.stride_tricks.as_strided(k, (400_000, 8, 128), (0, *k.strides[1:]))
        call = lambda: cache.prefill(0, [s], k, k)
    """,
    "one query over many rows": """
        cache, s = make(65_536, dense_below=8_000_000)
        before = cache.stats().tokens
        q = np.resize(block, (128, 32, 128))
        call = lambda: cache.attend(0, [s], q, [128])
    """,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_ctrl_c_ends_a_long_call_and_changes_nothing(call):
    program = """
        seconds = interrupted(call)
        assert cache.stats().tokens == before, cache.stats()
        assert cache.regions(s).retrieval <= before
        row = block[:1]
        cache.decode(0, [s], np.resize(row, (1, 32, 128)), row, row)
        print(seconds)
    """
    assert float(run(textwrap.dedent(call) + textwrap.dedent(program))) < ANSWER


def test_ctrl_c_ends_save_and_load(tmp_path):
    program = """
        cache, s = make(65_536, layers=4)
        other = "{folder}/saved"
        cache.save(s, other)
        saving = interrupted(lambda: [cache.save(s, "{folder}/again") for _ in range(100)])
        assert sorted(os.listdir("{folder}")) in (["saved"], ["again", "saved"])
        names = []
        loading = interrupted(lambda: [names.append(cache.load(other)) for _ in range(100)])
        assert cache.sequences() == [s, *names]
        print(max(saving, loading))
    """
    assert float(run(program.replace("{folder}", str(tmp_path)))) < ANSWER


def test_ctrl_c_ends_waiting_for_another_thread():
    program = """
        cache, s = make(8192)
        q = np.resize(block, (8192, 32, 128))
        threading.Thread(target=cache.attend, args=(0, [s], q, [8192]), daemon=True).start()
        time.sleep(0.2)
        print(interrupted(lambda: cache.length(s)))
    """
    assert float(run(program)) < ANSWER


def test_a_handler_that_raises_nothing_lets_the_call_go_on():
    program = """
        cache, s = make(2048)
        q = np.resize(block, (2048, 32, 128))
        expected = cache.attend(0, [s], q, [2048])
        came = []
        signal.signal(signal.SIGUSR1, lambda *_: came.append(time.perf_counter()))
        interrupt_after(0.05, signal.SIGUSR1)
        out = cache.attend(0, [s], q, [2048])
        print(len(came), bool((out == expected).all()))
    """
    assert run(program) == "1 True"


def test_what_a_handler_raises_comes_out_of_the_call():
    program = """
        cache, s = make(8192)
        q = np.resize(block, (8192, 32, 128))
        def late(*_):
            raise TimeoutError("too late")
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            cache.attend(0, [s], q, [8192])
        except TimeoutError as error:
            print(error)
    """
    assert run(program) == "too late"


def test_a_handler_that_calls_the_cache_is_told_why_not():
    program = """
        cache, s = make(8192)
        q = np.resize(block, (8192, 32, 128))
        signal.signal(signal.SIGINT, lambda *_: cache.stats())
        try:
            interrupted(lambda: cache.attend(0, [s], q, [8192]))
        except ValueError as error:
            print(error)
    """
    assert "inside a call on this cache" in run(program)


def test_a_handler_may_close_the_cache():
    program = """
        cache, s = make(2048)
        q, k = np.resize(block, (3072, 32, 128)), np.resize(block, (3072, 8, 128))
        signal.signal(signal.SIGINT, lambda *_: cache.close())
        interrupt_after(0.15)
        cache.attend(0, [s], q, k=k, v=k)
        try:
            cache.add()
        except ValueError as error:
            print(error)
    """
    assert "closed" in run(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_a_fork_inside_a_call_is_told_so():
    program = """
        import warnings
        warnings.simplefilter("ignore")
        cache, s = make(8192)
        q = np.resize(block, (8192, 32, 128))
        threading.Thread(target=cache.attend, args=(0, [s], q, [8192]), daemon=True).start()
        time.sleep(0.2)
        pid = os.fork()
        if pid == 0:
            try:
                cache.length(s)
            except ValueError as error:
                os._exit(7 if "forked while another thread was inside" in str(error) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        sys.stdout.flush()
        os._exit(0)  # the thread is still inside
    """
    assert run(program) == "7"


def test_a_call_of_another_thread_ends_by_itself():
    program = """
        cache, s = make(2048)
        q = np.resize(block, (2048, 32, 128))
        done = []
        thread = threading.Thread(
            target=lambda: done.append(cache.attend(0, [s], q, [2048]).shape))
        thread.start()
        time.sleep(0.05)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        thread.join()
        print(done)
    """
    assert run(program) == "[(2048, 32, 128)]"


def test_short_calls_are_not_slowed_by_looking_for_signals():
    config = pk.Config(layers=1, query_heads=2, kv_heads=1, head_dim=64, dtype="float32")
    cache = pk.Cache(config)
    sequence = cache.add()
    start = time.perf_counter()
    for _ in range(2000):
        cache.length(sequence)
    assert (time.perf_counter() - start) / 2000 < 100e-6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
