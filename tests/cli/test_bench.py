"""`pariskv bench`: the engine and torch take turns, and a busy machine is said."""

from __future__ import annotations

import json
import re
import sys

import pariskv_core as pk
import pytest
from conftest import Pariskv, plain
from pariskv_core import _machine as machine
from pariskv_core.cli import main, steps


def test_bench(pariskv: Pariskv, monkeypatch, capsys):
    small = ("bench", "--tokens", 4096, "--kv-heads", 2, "--query-heads", 4, "--head-dim", 64)
    done = pariskv(*small, "--threads", 1, "--device", "cpu")
    assert done.code == 0
    assert plain(done.out)
    assert re.search(r"^ *4,096 +[\d.]+ (µs|ms) .* ×$", done.out, re.M)
    monkeypatch.setitem(sys.modules, "torch", None)  # what a missing library looks like to import
    assert main([*map(str, small), "--threads", "1", "--device", "cpu", "--json"]) == 0
    [step] = json.loads(capsys.readouterr().out)["steps"]
    assert 0 < step["ours"] <= step["slowest"]
    assert step["dense"] is None


ONE_LAYER = (
    "bench --tokens 4096 --kv-heads 2 --query-heads 4 --head-dim 64 --device cpu --threads 1"
)


def test_bench_times_torch_and_the_engine_in_turns(monkeypatch, capsys):
    """Other programs then slow both down, and the ratio holds."""
    said: list[str] = []

    class Logged(pk.Cache):
        def decode(self, *arguments, **options):
            said.append("ours")
            return super().decode(*arguments, **options)

    class Torch:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Torch:
            return self

        def __exit__(self, *_: object) -> None: ...

        def steps(self, count: int) -> list[float]:
            said.append("torch")
            return [0.5] * count

    monkeypatch.setattr(pk, "Cache", Logged)
    monkeypatch.setattr(steps, "Dense", Torch)
    assert main([*ONE_LAYER.split(), "--json"]) == 0
    [step] = json.loads(capsys.readouterr().out)["steps"]
    assert step["dense"] == 0.5
    turns = "".join(word[0] for word in said).split("t")
    assert len(turns) == 5 and turns[-1] == ""
    assert len(set(map(len, turns[1:-1]))) == 1 and len(turns[1]) == 2 * steps.ROUNDS // 4


@pytest.mark.parametrize("busy", [0.0, 1.3])
def test_bench_says_when_the_machine_is_busy(monkeypatch, capsys, busy):
    monkeypatch.setattr(machine, "busy_cores", lambda: busy)
    assert main(ONE_LAYER.split()) == 0
    word = f"Other programs kept 1.3 of {machine.machine_cores()} cores busy"
    assert (word in " ".join(capsys.readouterr().out.split())) == (busy > 0)


def test_busy_cores_are_those_of_the_time_waited(monkeypatch, tmp_path):
    ticks = tmp_path / "stat"
    ticks.write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n")
    later = "cpu  160 0 50 820 70 0 0 0 0 0\n"  # 60 of 100 busy
    monkeypatch.setattr(machine, "_PROCESSORS", ticks)
    monkeypatch.setattr(machine, "machine_cores", lambda: 4)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: ticks.write_text(later))
    assert machine.busy_cores() == pytest.approx(2.4)
    ticks.unlink()
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    assert machine.busy_cores() == 0
