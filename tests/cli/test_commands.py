"""Every command as people run it: in a pipe, as text and as JSON."""

from __future__ import annotations

import html.parser
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pariskv_core as pk
import pytest
from conftest import Pariskv, plain
from pariskv_core.cli import main
from tiny_model import save_config

SHAPE = ("--layers", 2, "--kv-heads", 8, "--head-dim", 128)
ROOM = ("--device", "cpu", "--memory", "16GB")
SMALL = ("--part", "engine", "--tokens", 4096, "--steps", 80, "--layers", 1, "--top-k", 100)
COMMANDS = (
    "doctor",
    "plan",
    "generate",
    "verify",
    "explain",
    "eval",
    "bench",
    "demo",
    "ggml",
    "vllm",
)


def test_the_command_is_this_program():
    [script] = metadata.entry_points(group="console_scripts", name="pariskv")
    assert script.value == "pariskv_core.cli:main"


def test_help_names_every_command_and_loads_nothing_heavy(pariskv: Pariskv):
    done = pariskv("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name} ", done.out, re.M), name
    code = (
        "import sys\nfrom pariskv_core.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ggml_prints_a_path_that_loads_or_says_how_to_get_one(pariskv: Pariskv):
    done = pariskv("ggml")
    if (Path(pk.__file__).parent / "ggml").exists():
        assert Path(done.out.strip()).name == "libggml-pariskv.so"
        assert pariskv("ggml", "--json").record == {"path": done.out.strip()}
    else:
        assert done.code == 2
        assert "`make plugin` builds it" in done.err


def test_vllm_prints_the_command_that_it_would_run(pariskv: Pariskv):
    options = ["--set", "top_k=64", "--set", "memory_budget=60GB"]
    done = pariskv("vllm", *options, "--print", "some/model", "--port", "8001")
    made = shlex.split(done.out)
    assert made[:5] == ["vllm", "serve", "some/model", "--attention-backend", "CUSTOM"]
    assert json.loads(made[6]) == {"kv_connector": "ParisKV", "kv_role": "kv_both"}
    assert json.loads(made[8]) == {"pariskv": {"top_k": 64, "memory_budget": "60GB"}}
    assert made[9:] == ["--port", "8001"]
    as_json = pariskv("vllm", *options, "--print", "--json", "some/model", "--port", "8001")
    assert as_json.record == {"command": made}


def test_vllm_asks_for_another_role_where_prompts_may_have_pictures(
    pariskv: Pariskv, tmp_path: Path
):
    seeing = save_config(tmp_path / "seeing", vision_config={"hidden_size": 64})
    for model, role in ((seeing, "kv_producer"), (save_config(tmp_path / "text"), "kv_both")):
        made = shlex.split(pariskv("vllm", "--print", model).out)
        assert json.loads(made[made.index("--kv-transfer-config") + 1])["kv_role"] == role


@pytest.mark.parametrize("other", ["sliding_attention", "linear_attention"])
def test_vllm_sends_layers_of_full_attention_alone_where_there_are_others(
    pariskv: Pariskv, tmp_path: Path, other: str
):
    kinds = [other, "full_attention"]
    mixed = save_config(tmp_path / "mixed", layer_types=kinds, sliding_window=512)
    made = shlex.split(pariskv("vllm", "--print", mixed).out)
    assert made[3] == "--attention-config"
    assert json.loads(made[4]) == {"backend_per_kind": {"full_attention": "CUSTOM"}}
    assert "--attention-backend" not in made
    plain_model = save_config(tmp_path / "plain")
    assert "--attention-backend" in pariskv("vllm", "--print", plain_model).out


def test_vllm_refuses_settings_that_are_not_known(pariskv: Pariskv):
    done = pariskv("vllm", "--set", "topk=64", "--print", "some/model")
    assert done.code == 2
    assert "got topk; did you mean top_k?" in done.err
    assert "expected name=value, got top_k" in pariskv("vllm", "--set", "top_k", "m").err


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("threads=-3", "threads: expected 0 to 1024, got -3"),
        ("threads=2.5", "threads: expected an integer, got float"),
        ("sink=-3", "sink: expected 0 to 8388608, or -1 for the policy's own, got -3"),
        ("update=0", "update: expected 1 to 8388608"),
        ("dense_below=-7", "dense_below: expected 0 to 8388608"),
        ("row_cache=-9", "row_cache: expected -1 to 8388608, got -9"),
        ("top_k=0", "top_k: expected 1 to 8388608, got 0"),
        ("memory_budget=1e30", 'memory_budget: expected bytes, or as "60GB", got 1e+30'),
    ],
)
def test_vllm_refuses_numbers_that_the_engine_refuses(setting: str, sentence: str, capsys):
    assert main(["vllm", "--set", setting, "--print", "some/model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err


def test_vllm_refuses_options_that_it_sets(pariskv: Pariskv):
    for option in (["--attention-backend", "X"], ["--kv-transfer-config={}"]):
        done = pariskv("vllm", "--print", "some/model", *option)
        assert done.code == 2
        assert f"{option[0].partition('=')[0]}: expected it once" in done.err
    own = ["--additional-config", "{}"]
    assert pariskv("vllm", "--print", "some/model", *own).code == 0
    assert pariskv("vllm", "--set", "top_k=9", "--print", "some/model", *own).code == 2


def test_plan_counts_sequences_under_vllm(pariskv: Pariskv):
    asked = ["plan", *SHAPE, "--context", "128K", *ROOM, "--vllm"]
    assert re.search(r"vLLM serves \d+ sequences? of 131,072 tokens at once", pariskv(*asked).out)
    plain, narrow = (
        pariskv(*asked, "--json", *more).record["vllm_sequences"]
        for more in ([], ["--kv-dtype", "int8"])
    )
    assert narrow > plain > 0
    shorter = ["plan", *SHAPE, "--context", "32K", *ROOM, "--vllm", "--json"]
    assert pariskv(*shorter).record["vllm_sequences"] > plain
    none = ["plan", *SHAPE, "--context", "128K", "--vllm", "--device", "cuda"]
    done = pariskv(*none, "--memory", "600MB", "--host-memory", "16GB", "--json")
    assert done.record["vllm_sequences"] == 0
    assert done.code == 1


def test_plan_takes_from_a_gpu_what_vllm_takes(pariskv: Pariskv, tmp_path: Path):
    folder = save_config(tmp_path / "model", intermediate_size=14336, vocab_size=128_256)
    asked = ["plan", folder, "--context", "4096", "--device", "cuda", "--vllm"]
    asked += ["--memory", "80GB", "--host-memory", "100GB", "--weights", "16GB"]
    found = pariskv(*asked, "--json").record["vllm"]
    options = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "utilization")
    assert [found[name] for name in options] == [4096, 1024, 8192, 0.92]
    working = 3 * (8192 * 2 * 14336 * 2 + 1024 * 128_256 * 4)
    assert found["activations"] == working
    graphs = (51 * 2 << 20) + (1 << 28)  # as many sizes as vLLM captures, of two layers
    assert found["graphs"] == graphs
    assert found["engine_bytes"] == int(80e9 * 0.92) - int(16e9) - working - graphs
    assert found["engine_host_bytes"] == 80e9
    said = " ".join(pariskv(*asked).out.split())
    assert "Assumed for vLLM: --gpu-memory-utilization 0.92, --max-model-len 4096, " in said
    assert "2.99 GB of activations and 375 MB for graphs the engine has 54.2 GB" in said

    half = pariskv(*asked, "--utilization", "0.5", "--json").record["vllm"]
    assert half["engine_bytes"] == found["engine_bytes"] - int(80e9 * 0.42)
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = save_config(
        tmp_path / "mixed",
        num_hidden_layers=4,
        layer_types=kinds,
        sliding_window=512,
        intermediate_size=14336,
        vocab_size=128_256,
    )
    asked[1] = mixed
    beside = pariskv(*asked, "--json").record["vllm"]
    assert beside["engine_bytes"] == found["engine_bytes"] - beside["other_layers"]
    assert found["other_layers"] is None
    assert "for other layers the engine has" in " ".join(pariskv(*asked).out.split())
    asked[1] = folder

    few = pariskv(*asked, "--max-num-seqs", "8", "--json").record["vllm"]
    assert few["sequences"] == few["max_num_seqs"] == 8 < found["sequences"]
    assert few["engine_bytes"] > found["engine_bytes"]


def test_plan_says_why_vllm_would_not_start(pariskv: Pariskv, tmp_path: Path):
    asked = ["plan", *SHAPE, "--context", "128K", "--device", "cuda", "--host-memory", "16GB"]
    done = pariskv(*asked, "--memory", "600MB", "--vllm")
    assert done.code == 1
    said = " ".join(done.out.split())
    assert "vLLM does not start so: a request of 131,072 tokens takes" in said
    assert "Activations are not counted: a model's config says how wide they are." in said
    kinds = ["sliding_attention", "full_attention"]
    mixed = save_config(tmp_path / "model", layer_types=kinds, sliding_window=512)
    found = pariskv("plan", mixed, *ROOM, "--vllm", "--json").record["vllm"]
    assert found["sequences"] > 0


def test_doctor(pariskv: Pariskv):
    done = pariskv("doctor")
    assert done.code in (0, 1)
    assert plain(done.out)
    assert re.search(r"reading memory +\d+\.\d GB/s", done.out)
    found = pariskv("doctor", "--no-bandwidth", "--json").record
    assert found["pariskv_core"] == pk.__version__
    assert found["ready"]["cpu"] is True
    assert found["host_bytes_per_second"] is None
    assert 0 < found["memory_available"] <= found["memory"]
    assert all(finding["do"] for finding in found["findings"])


def test_plan(pariskv: Pariskv, tmp_path: Path):
    folder = save_config(tmp_path / "model", max_position_embeddings=32768)
    done = pariskv("plan", folder, *ROOM)
    assert (done.code, done.err) == (0, "")
    assert plain(done.out)
    assert "It fits." in done.out
    assert "Largest context for this batch: 32,768 tokens" in done.out
    longer = pariskv("plan", folder, "--context", "64K", *ROOM).out
    assert "The model was made for 32,768 tokens, fewer than these." in longer
    served = pariskv("plan", folder, "--context", "64K", *ROOM, "--vllm")
    said = "fewer than these; vLLM refuses a longer --max-model-len by default."
    assert f"The model was made for 32,768 tokens, {said}" in " ".join(served.out.split())
    assert served.code == 0
    assert "was made for" not in pariskv("plan", folder, "--context", "32K", *ROOM, "--vllm").out
    done = pariskv("plan", *SHAPE, "--context", "1M", *ROOM, "--json")
    assert done.code == 0
    assert done.record["context"] == 1 << 20
    assert done.record["device_bytes"] > 1e9


def test_plan_of_rows_that_are_dropped(pariskv: Pariskv):
    done = pariskv("plan", *SHAPE, "--context", "1M", *ROOM, "--kept", "256")
    assert done.code == 0
    assert "A token of the answer takes nothing" in done.out
    assert "kept rows" in done.out
    found = pariskv("plan", *SHAPE, "--context", "1M", *ROOM, "--kept", "256", "--json").record
    assert found["bytes_per_token"] == {"device": 0, "host": 0}
    assert found["host_bytes"] == 0
    refused = pariskv("plan", *SHAPE, "--context", "1M", *ROOM, "--kept", "256", "--measure")
    assert refused.code == 2
    assert "--measure times a search" in refused.err


def test_plan_of_rows_in_8_bits(pariskv: Pariskv):
    command = ("plan", *SHAPE, "--context", "128K", "--memory", "80GB", "--device", "cpu", "--json")
    plain = pariskv(*command).record
    found = pariskv(*command, "--kv-dtype", "int8").record
    assert found["device_bytes"] < plain["device_bytes"]
    assert found["bytes_per_token"]["device"] < plain["bytes_per_token"]["device"]
    assert found["full_attention_bytes"] == plain["full_attention_bytes"]
    command = ("plan", *SHAPE, "--context", "1M", *ROOM, "--device", "cuda", "--json")
    plain = pariskv(*command).record
    found = pariskv(*command, "--kv-dtype", "int8").record
    assert found["bytes_per_token"]["host"] / plain["bytes_per_token"]["host"] == 264 / 512


def test_plan_says_what_does_not_fit(pariskv: Pariskv):
    tight = ("--memory", "100MB", "--host-memory", "1GB")
    done = pariskv("plan", *SHAPE, "--context", "128K", *tight)
    assert done.code == 1
    assert "It does not fit." in done.out
    found = pariskv("plan", *SHAPE, "--context", "128K", *tight, "--json").record
    assert (found["device"], found["fits"]) == ("cuda", False)
    assert 0 < found["largest_context"] < 128 << 10


def test_plan_can_measure(pariskv: Pariskv):
    done = pariskv("plan", *SHAPE, "--context", 4096, *ROOM, "--measure", "--threads", 1, "--json")
    steps = done.record["step_seconds"]
    assert steps["source"] == "measured here"
    assert 0 < steps["ours"] < 1


def test_demo_finds_the_facts(pariskv: Pariskv):
    done = pariskv("demo", *SMALL, "--json")
    assert done.code == 0, done.out + done.err
    found = done.record["engine"]
    assert found["facts_found_everywhere"] > 30
    assert found["problems"] == []


def test_generate_writes_the_text_alone_to_a_pipe(
    pariskv: Pariskv, model: Path, long_text: Path, monkeypatch, capsys
):
    ask = ("generate", model, "--max-new-tokens", 12, "--threads", 1)
    done = pariskv(*ask, "--prompt-file", long_text)
    assert done.code == 0, done.err
    assert re.fullmatch(r"[!-~]{12}\n", done.out)  # printable ASCII is all that it can say
    assert "5,000 tokens read" in done.err
    assert "each step attended to 4 first and" in done.err
    with long_text.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file, encoding="utf-8"))
        assert main([*map(str, ask), "--prompt-file", "-", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    same = json.loads(out)
    assert same["text"] == done.out.strip()
    assert same["prompt_tokens"] == 5000
    assert same["attended"]["selected"] == 100
    assert same["tokens_per_second"] > 0


def test_verify(pariskv: Pariskv, model: Path, capsys):
    ask = ("verify", model, "--tokens", 4500, "--max-new-tokens", 8, "--threads", 1)
    done = pariskv(*ask)
    assert done.code == 0, done.out + done.err
    assert plain(done.out)
    assert re.search(r"same likeliest token +8 of 8", done.out)
    assert "It holds." in done.out
    assert "A step at top_k 100 predicts an error of" in done.out
    strict = [*map(str, ask), "--top-k", "4", "--kl-at-most", "0", "--json"]
    assert main(strict) == 1
    exact, sparse = (found := json.loads(capsys.readouterr().out))["exact"], found["sparse"]
    assert exact["same"] + exact["ties"] == 8
    assert exact["kl_mean"] < sparse["kl_mean"]
    assert sparse["searches"] > 0
    assert "The mean KL" in found["problems"][0]
    errors = found["errors"]
    assert errors["searches"] == 7 * 2 * 2  # steps of one token, layers, kv heads
    assert errors["true"] > errors["rounding"] and errors["predicted"] > 0
    assert errors["ratio"] == pytest.approx(errors["predicted"] / errors["true"])
    assert errors["holds"] is (0.5 <= errors["ratio"] <= 2)


def test_verify_predicts_nothing_of_a_text_that_is_not_searched(pariskv: Pariskv, model: Path):
    ask = ("verify", model, "Hello there.", "--max-new-tokens", 3, "--threads", 1)
    done = pariskv(*ask)
    assert "Nothing was searched" in done.out and "predicts" not in done.out
    assert pariskv(*ask, "--json").record["errors"] is None


class Elements(html.parser.HTMLParser):
    """Every element is closed, and none refers to another file."""

    VOID = ("meta", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_explain(pariskv: Pariskv, model: Path, long_text: Path, tmp_path: Path, capsys):
    page = tmp_path / "look.html"
    ask = ("explain", model, "--prompt-file", long_text, "--max-new-tokens", 4, "--threads", 1)
    done = pariskv(*ask, "--html", page, env={"COLUMNS": "60"})
    assert done.code == 0, done.err
    assert plain(done.out)
    lines = done.out.splitlines()
    assert max(len(line) for line in lines if str(page) not in line) <= 60
    assert "Selected rows" in done.out
    assert "█" in done.out
    said = "The step predicts an error of"
    assert said in " ".join(lines) and said in page.read_text(encoding="utf-8")
    elements = Elements()
    text = page.read_text(encoding="utf-8")
    elements.feed(text)
    assert elements.open == []
    assert {"svg", "rect", "mark", "table"} <= elements.seen
    assert "script" not in elements.seen and "@import" not in text and "url(" not in text
    assert main([*map(str, ask), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 5003  # the fourth token was chosen and not stored
    assert sum(found["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert {"predicted", "true", "relative", "ratio", "holds"} <= found["errors"].keys()
    for layer in found["layers"]:
        for rows in layer["selected"]:
            assert len(set(rows)) == 100
            assert all(found["zone_begin"] <= row < found["zone_end"] for row in rows)
    source = long_text.read_text(encoding="utf-8")
    assert all(p["token"] == source[p["hottest"]] for p in found["passages"])


def in_terminal(*arguments: object, **env: str) -> str:
    """What the command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pariskv_core", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80", **env}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how a terminal says that its other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_a_terminal_gets_colours_unless_they_are_not_wanted():
    ask = ("plan", *SHAPE, "--context", 8192, *ROOM)
    assert "\x1b[32m" in in_terminal(*ask)
    without = in_terminal(*ask, NO_COLOR="1")
    assert "It fits." in without
    assert not re.search(r"\x1b\[[34]\d", without)
    assert "\x1b" not in in_terminal(*ask, TERM="dumb", NO_COLOR="1")


def test_ctrl_c_stops_with_one_line():
    command = [sys.executable, "-m", "pariskv_core", "demo", "--part", "engine", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ParisKV" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "pariskv demo: stopped"


def test_a_reader_that_leaves_gets_no_traceback():
    command = f"{sys.executable} -m pariskv_core doctor --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""
