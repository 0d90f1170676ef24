"""Saved sequences: they continue with the same bits on either backend; refusals change nothing."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    DTYPES,
    SEARCHES,
    assert_same_bits,
    assert_same_sequence,
    child_environment,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    rows_of,
    unchanged,
    with_changes,
)


def lived(config: pk.Config, rng: np.random.Generator, tokens: int = 1300) -> tuple[pk.Cache, int]:
    """A cache with a sequence that has a zone, a window and a buffer."""
    cache = pk.Cache(config)
    s = cache.add()
    for layer in range(config.layers):
        cache.prefill(layer, [s], *randn_kv(rng, tokens, config), q=randn_q(rng, tokens, config))
        for _ in range(10):
            cache.decode(layer, [s], *randn_step(rng, 1, config))
    return cache, s


def same_steps(a: pk.Cache, s: int, b: pk.Cache, t: int, rng: np.random.Generator) -> None:
    """Decode steps over a flush, a turn, a cut: the same bits from both."""
    config = a.config
    for layer in range(config.layers):
        for _ in range(config.update):
            step = randn_step(rng, 1, config)
            assert_same_bits(a.decode(layer, [s], *step), b.decode(layer, [t], *step))
        q, k, v = randn_step(rng, 30, config)
        outs = (c.attend(layer, [x], q, k=k, v=v) for c, x in ((a, s), (b, t)))
        assert_same_bits(*outs, "turn")
    for cache, x in ((a, s), (b, t)):
        cache.truncate([x], drop=50)
        cache.flush([x])
    assert_same_sequence(a, s, b, t, randn_q(rng, 1, config)[0])


@pytest.mark.parametrize("search", SEARCHES)
def test_a_loaded_sequence_continues_with_the_same_bits(search, dtype, device, tmp_path, rng):
    config = make_config(layers=2, dtype=dtype, device=device, value_dim=128, **SEARCHES[search])
    cache, s = lived(config, rng)
    with unchanged(cache):
        cache.save(s, tmp_path / "one")
    other = pk.Cache(config)
    loaded = other.load(tmp_path / "one")
    assert_same_sequence(cache, s, other, loaded, randn_q(rng, 1, config)[0])
    other.save(loaded, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    same_steps(cache, s, other, loaded, rng)


def test_forks_and_tails_of_loaded_sequences(device, tmp_path, rng):
    config = make_config(block=64, tail="sample", tail_rows=16, device=device)
    cache, s = lived(config, rng, 1500)
    fork = cache.fork(s)
    cache.save(fork, tmp_path / "one")
    loaded = cache.load(tmp_path / "one")
    cache.remove(fork)
    same_steps(cache, cache.fork(s), cache, cache.fork(loaded), rng)
    same_steps(cache, s, cache, loaded, rng)


class Lives:
    """One cache whose sequences are saved and loaded now and then, and one where they never are."""

    def __init__(self, seed: int, folder: Path, device: str) -> None:
        self.rng = np.random.default_rng(seed)
        search = list(SEARCHES.values())[seed % len(SEARCHES)]
        self.config = make_config(
            layers=2,
            dtype=DTYPES[seed % 3],
            device=device,
            sink=int(self.rng.integers(0, 6)),
            local=int(self.rng.integers(1, 40)),
            update=int(self.rng.integers(1, 60)),
            dense_below=int(self.rng.choice([0, 200])),
            **{**search, "tail": str(self.rng.choice(["none", "sample"])), "tail_rows": 16},
        )
        self.caches = [pk.Cache(self.config), pk.Cache(self.config)]
        self.sequences = [[cache.add()] for cache in self.caches]
        self.path = folder / "life"
        self.saved = 0

    def both(self, verb: str, *layer: int, which: list[int], args: tuple = (), **keywords) -> None:
        """The same call for the same sequences of both caches; outputs are the same bits."""
        outs = [
            getattr(cache, verb)(*layer, [own[i] for i in which], *args, **keywords)
            for cache, own in zip(self.caches, self.sequences, strict=True)
        ]
        if outs[0] is not None:
            assert_same_bits(*outs)

    def step(self) -> None:
        rng, config = self.rng, self.config
        at = int(rng.integers(len(self.sequences[0])))
        length = min(self.caches[0].length(self.sequences[0][at], i) for i in range(config.layers))
        deed = rng.choice(
            ["prefill", "decode", "turn", "cut", "flush", "fork", "drop", "save"],
            p=[0.1, 0.3, 0.1, 0.1, 0.05, 0.07, 0.03, 0.25],
        )
        if deed == "save":
            cache, own = self.caches[0], self.sequences[0]
            cache.save(own[at], self.path)
            if rng.random() < 0.8:
                cache.remove(own[at])
            own[at] = cache.load(self.path)
            self.saved += 1
        elif deed == "fork" and len(self.sequences[0]) < 4:
            for cache, own in zip(self.caches, self.sequences, strict=True):
                own.append(cache.fork(own[at]))
        elif deed == "drop" and len(self.sequences[0]) > 1:
            for cache, own in zip(self.caches, self.sequences, strict=True):
                cache.remove(own.pop(at))
        elif deed == "flush":
            self.both("flush", which=[at])
        elif deed == "cut":
            drop = int(rng.integers(0, length + 1)) if rng.random() < 0.2 else min(length, 30)
            self.both("truncate", which=[at], drop=drop)
        for layer in range(config.layers):
            if deed == "prefill":
                most = 1200 if config.policy.block else 300  # now and then a zone opens
                q, k, v = randn_step(rng, int(rng.integers(1, most)), config)
                self.both("prefill", layer, which=[at], args=(k, v), q=q)
            elif deed == "turn":
                q, k, v = randn_step(rng, int(rng.integers(1, 40)), config)
                self.both("attend", layer, which=[at], args=(q,), k=k, v=v)
            elif deed == "decode":
                which = list(range(len(self.sequences[0])))
                self.both("decode", layer, which=which, args=randn_step(rng, len(which), config))


@pytest.mark.parametrize("seed", range(12))
def test_lives_with_files_equal_lives_without(seed, device, tmp_path):
    lives = Lives(seed, tmp_path, device)
    for _ in range(60):
        lives.step()
    assert lives.saved > 5
    probe = randn_q(lives.rng, 1, lives.config)[0]
    for mine, theirs in zip(*lives.sequences, strict=True):
        assert_same_sequence(lives.caches[0], mine, lives.caches[1], theirs, probe)
    assert [p.name for p in tmp_path.iterdir()] == ["life"]


@pytest.mark.cuda
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_file_of_one_backend_continues_on_the_other(search, placement, dtype, tmp_path):
    changes = {"layers": 2, "dtype": dtype, "tail": "sample", "tail_rows": 16, **SEARCHES[search]}
    configs = [make_config(device="cpu", **changes)]
    configs.append(make_config(device="cuda", **changes).replace(placement=placement))
    (cpu, s), (gpu, t) = (lived(config, np.random.default_rng(3), 1200) for config in configs)
    cpu.save(s, tmp_path / "cpu")
    gpu.save(t, tmp_path / "gpu")
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()
    for cache, own, file in ((cpu, s, "gpu"), (gpu, t, "cpu")):
        same_steps(cache, own, cache, cache.load(tmp_path / file), np.random.default_rng(4))


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("tokens", [900, 2500, 4000])
@pytest.mark.parametrize("to", [0, 3000, 6000])
def test_where_zones_open_may_have_been_another(block, tokens, to, tmp_path):
    # Rows, summaries and the balance are the file's; what is dense or searched is this cache's.
    config = make_config(block=block, dense_below=2500)
    cache, s = lived(config, np.random.default_rng(3), tokens)
    cache.save(s, tmp_path / "file")
    other = pk.Cache(config.replace(dense_below=to))
    t = other.load(tmp_path / "file")
    for mine, theirs in zip(rows_of(cache, s), rows_of(other, t), strict=True):
        assert_same_bits(mine, theirs)
    assert regions_of(cache, s) == regions_of(other, t)
    rng = np.random.default_rng(5)
    for _ in range(120):
        other.decode(0, [t], *randn_step(rng, 1, config))
    total, zone = other.length(t), other.regions(t).retrieval
    assert (other.stats().searched_tokens > 0) == (total > to and zone > config.policy.top_k)
    q = randn_q(rng, 1, config)
    out = other.decode(0, [t], q)
    if total < to:  # attended to in full, whether a zone is there or not
        torch.testing.assert_close(out, other.attend(0, [t], q), rtol=1e-4, atol=1e-5)
    other.truncate([t], drop=5)
    other.decode(0, [t], q)


def test_any_kind_of_path(tmp_path, rng):
    cache, s = lived(make_config(), rng, 50)
    name = "Gedächtnis 記憶 📚.pkv"
    for path in (tmp_path / name, str(tmp_path / name), os.fsencode(tmp_path / name)):
        cache.save(s, path)
        assert cache.length(cache.load(path)) == 60
    raw = os.fsencode(tmp_path) + b"/\xff\xfe"  # no text in any encoding
    cache.save(s, raw)
    assert cache.length(cache.load(os.fsdecode(raw))) == 60
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        cache.save(s, "here")
        assert cache.length(cache.load("./here")) == 60
    finally:
        os.chdir(before)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("path", [None, 3, object(), ["a"]])
def test_what_is_no_path_is_refused_by_name(path, rng):
    cache, s = lived(make_config(), rng, 50)
    expected = rf"path: expected str, bytes or os.PathLike, got {type(path).__name__}"
    with unchanged(cache):
        with pytest.raises(TypeError, match=r"\[save\] " + expected):
            cache.save(s, path)
        with pytest.raises(TypeError, match=r"\[load\] " + expected):
            cache.load(path)


def test_refusals_of_the_system_are_oserrors(tmp_path, rng):
    cache, s = lived(make_config(), rng, 50)
    with unchanged(cache):
        with pytest.raises(FileNotFoundError, match=r"\[load\] path: cannot look at .*none") as no:
            cache.load(tmp_path / "none")
        assert no.value.errno == errno.ENOENT
        with pytest.raises(IsADirectoryError, match="expected a file, got a folder"):
            cache.load(tmp_path)
        with pytest.raises(IsADirectoryError, match="expected a file, got a folder"):
            cache.save(s, tmp_path)
        with pytest.raises(FileNotFoundError, match="cannot write to the folder"):
            cache.save(s, tmp_path / "none" / "x")
        with pytest.raises(OSError, match="got a device or a pipe, /dev/full"):
            cache.save(s, "/dev/full")
        with pytest.raises(ValueError, match=r"\[save\] sequences: 99 is not a sequence"):
            cache.save(99, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_and_another_config_are_value_errors(device, tmp_path, rng):
    config = make_config(device=device)
    cache, s = lived(config, rng)
    cache.save(s, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for _ in range(50):
        at = int(rng.integers(len(whole)))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "x").write_bytes(damaged)
        with unchanged(cache), pytest.raises(ValueError, match=r"\[load\] path: expected "):
            cache.load(tmp_path / "x")
    (tmp_path / "x").write_bytes(whole)
    for field, value, sentence in (
        ("kv_heads", 4, "kv_heads 4 as this one, got 2 in"),
        ("dtype", "float16", "dtype float16 as this one, got float32 in"),
        ("seed", 7, "policy.seed 7 as this one, got 42 in"),
    ):
        other = pk.Cache(with_changes(config, **{field: value}))
        with unchanged(other), pytest.raises(ValueError, match=sentence):
            other.load(tmp_path / "x")


def test_more_than_the_budget_holds(device, tmp_path, rng):
    config = make_config(device=device)
    cache, s = lived(config, rng, 20_000)
    cache.save(s, tmp_path / "x")
    small = pk.Cache(config.replace(memory_budget=8 << 20))
    own = small.add()
    small.prefill(0, [own], *randn_kv(rng, 100, config))
    with unchanged(small), pytest.raises(pk.OutOfMemory, match="of the budget of 8388608"):
        small.load(tmp_path / "x")
    small.decode(0, [own], *randn_step(rng, 1, config))


def child(program: str, folder: Path) -> subprocess.CompletedProcess:
    setup = """
        import os, resource, signal, sys, threading, time
        import numpy as np, pariskv_core as pk
        config = pk.Config(layers=4, query_heads=2, kv_heads=2, head_dim=64, dtype="float32")
        cache = pk.Cache(config)
        s = cache.add()
        k = np.random.default_rng(0).standard_normal((20_000, 2, 64), dtype=np.float32)
        for layer in range(4):
            cache.prefill(layer, [s], k, k)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(setup) + textwrap.dedent(program)],
        env=child_environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.cpu("processes of their own")
def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    program = """
        cache.save(s, "x")
        before = open("x", "rb").read()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, -1))
        try:
            cache.save(s, "x")
        except OSError as error:
            print(error.errno, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert open("x", "rb").read() == before and os.listdir() == ["x"]
        assert cache.length(cache.load("x")) == 20_000
    """
    done = child(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{errno.EFBIG} [Errno {errno.EFBIG}] [save] path: cannot write x: " in done.stdout


@pytest.mark.cpu("processes of their own")
def test_files_and_folders_without_permission(tmp_path):
    program = """
        cache.save(s, "x")
        os.chmod("x", 0), os.chmod(".", 0o555)
        if os.geteuid() == 0:
            os.setuid(65534)
        for call in (lambda: cache.load("x"), lambda: cache.save(s, "y")):
            try:
                call()
            except PermissionError as error:
                print(error)
        print(os.listdir())
    """
    done = child(program, tmp_path)
    tmp_path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    cannot_read, cannot_write, listed = done.stdout.splitlines()
    assert "[load] path: cannot read x: Permission denied" in cannot_read
    assert "[save] path: cannot write to the folder .: Permission denied" in cannot_write
    assert listed == "['x']"


@pytest.mark.cpu("processes of their own")
def test_control_c_leaves_no_temporary_file(tmp_path):
    program = """
        cache.save(s, "x")
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                cache.save(s, "x")
        except KeyboardInterrupt:
            print(os.listdir(), cache.length(cache.load("x")))
    """
    done = child(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['x'] 20000"


@pytest.mark.cpu("threads of Python")
def test_other_threads_run_while_a_file_is_written(tmp_path, rng):
    config = make_config(dtype="float32", threads=1)
    cache, s = lived(config, rng, 60_000)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    cache.save(s, tmp_path / "x")
    loaded = cache.load(tmp_path / "x")
    end = time.perf_counter()
    done.set()
    thread.join()
    assert cache.length(loaded) == cache.length(s)
    during = [t for t in ticks if start < t < end]
    assert len(during) > 10 or end - start < 0.05, (len(during), end - start)
