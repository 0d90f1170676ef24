"""Same config, same input: same bits. Run after run, on any thread count and instruction set."""

import functools
import json
import subprocess
import sys
import textwrap

import digest
import kept_digest
import pytest
from support import HERE, LEVELS, child_environment, current_device


def forced(level: str) -> dict:
    """What digest.py prints in a process of its own, held to an instruction set."""
    done = subprocess.run(
        [sys.executable, str(HERE / "digest.py")],
        env=child_environment(PARISKV_CPU_LEVEL=level),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name] != b[name]]


# The CUDA backend has none of these.
of_the_cpu = pytest.mark.cpu("threads and instruction sets")


@functools.cache
def first_run(device: str) -> dict[str, str]:
    assert device == current_device()
    return digest.all_digests(threads=2)


@functools.cache
def first_kept() -> dict[str, str]:
    return kept_digest.all_kept(threads=2)


@pytest.fixture
def here(device: str) -> dict[str, str]:
    return first_run(device)


@pytest.mark.cuda  # on the CPU a process that is held to its own level is the second run
def test_a_second_run_gives_the_same_bits(here):
    assert differing(here, digest.all_digests(threads=2)) == []


@pytest.mark.cuda
def test_rows_that_stay_on_a_gpu_do_not_show(here):
    assert differing(here, digest.all_digests(threads=2, row_cache=0)) == []


@of_the_cpu
@pytest.mark.parametrize("threads", [1, 5])
def test_the_thread_count_does_not_show(here, threads):
    assert differing(here, digest.all_digests(threads)) == []


@of_the_cpu
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_gives_the_same_bits(here, level):
    """And on any number of threads the same rows are kept. All can be lowered to plain."""
    result = forced(level)
    if result["level"] != level and level != "plain":
        pytest.skip(f"this machine or build stops at {result['level']}")
    assert result["level"] == level
    assert differing(result["digests"], here) == []
    for kept in result["kept"]:
        assert differing(kept, first_kept()) == []


@of_the_cpu
def test_an_unknown_level_is_refused_and_named():
    program = """
        import pariskv_core as pk  # importing does not look yet
        config = pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64)
        for call in (pk.cpu_level, lambda: pk.Cache(config)):
            try:
                call()
            except ValueError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=child_environment(PARISKV_CPU_LEVEL="quantum"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "PARISKV_CPU_LEVEL: expected plain, avx2 or avx512, got quantum" in line


def test_digests_tell_inputs_apart(here):
    # The other tests would be empty if the hash were of nothing.
    assert len(set(here.values())) == len(here)
    assert digest.run({}, seed=0, threads=1) != digest.run({}, seed=7, threads=1)
