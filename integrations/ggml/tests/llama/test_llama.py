"""Text, perplexity and servers of stock llama.cpp with the plugin beside the same without it."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import compared, run
from pariskv_core.cli.document import FACTS, with_facts

# SmolLM2 has 30 layers. In check mode the host computes each step too; errors are of a layer's
# output. Lists of cells that are wrong, or summaries of other numbers, put it near 1.
LAYERS = 30
MEAN_ERROR, WORST_ERROR = 0.02, 0.3


def test_text_below_the_gate_is_the_hosts(model: Path, plugin: Path, text: str) -> None:
    arguments = ["-m", model, "-t", 2, "-c", 8192, "-fa", "on", "--temp", 0, "-n", 200, "-no-cnv"]
    arguments += ["--no-display-prompt", "-p", text[:4000]]
    alone = run("llama-completion", *arguments, plugin=None, with_log=False)
    assert len(alone) > 200
    assert run("llama-completion", *arguments, plugin=plugin, with_log=False) == alone


def test_attention_in_full_keeps_the_text(model: Path, plugin: Path, text: str) -> None:
    """Through our lists of cells and kernels, with nothing left out: the same tokens."""
    arguments = ["-m", model, "-t", 2, "-c", 4096, "-fa", "on", "--temp", 0, "-n", 60, "-no-cnv"]
    arguments += ["--no-display-prompt", "-p", text[:6000]]
    settings = "from=1024,dense_below=1000000,check=1"
    log = run("llama-completion", *arguments, "-v", plugin=plugin, settings=settings)
    steps, mean, worst = compared(log)
    assert steps >= 50 * LAYERS
    assert mean < 6e-3, "the host's kernel adds up in 16 bits"
    assert worst < 3e-2


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_perplexity_at_8192(
    model: Path, plugin: Path, text: str, tmp_path: Path, kind: str
) -> None:
    written = tmp_path / "text"
    written.write_text(text)
    logits = tmp_path / "logits"
    arguments = ["-m", model, "-t", 2, "-c", 8192, "-b", 8192, "--chunks", 1, "-f", written]
    arguments += ["-fa", "on", "-ctk", kind, "-ctv", kind, "--kl-divergence-base", logits]
    run("llama-perplexity", *arguments, plugin=None)
    # A token at a time: prompts in batches are the host's own.
    # From where the second half begins: by default heads as small as these are searched later.
    log = run(
        "llama-perplexity",
        *arguments,
        "-ub",
        1,
        "--kl-divergence",
        plugin=plugin,
        settings="from=4096",
    )
    ratio = float(re.search(r"Mean PPL\(Q\)/PPL\(base\) +: +([\d.]+)", log)[1])
    divergence = float(re.search(r"Mean +KLD: +([\d.]+)", log)[1])
    print(f"{kind}: perplexity {ratio:.4f} times the host's, KL {divergence:.4f}")
    assert ratio == pytest.approx(1, abs=0.005)
    assert divergence < 0.01


def test_facts_of_a_long_document_are_found(serve) -> None:
    """`pariskv demo`'s document of 6,600 tokens and its six facts: as many as the host finds."""
    document = with_facts(6600, lambda text: len(text) // 4)
    found = {}
    for with_plugin in (True, False):
        server = serve("from=4096", "-np", 1, "-c", 8192, with_plugin=with_plugin)
        found[with_plugin] = [
            fact.answer in server.complete(f"{document}\n\n{fact.question}\n{fact.begin}", 12)
            for fact in FACTS
        ]
        server.stop()
    print(f"facts that were found: {found}")
    assert sum(found[True]) >= sum(found[False])
    assert sum(found[True]) >= 4


def mixed_requests(text: str, count: int) -> list[tuple[str, int]]:
    chance = random.Random(7)
    pages = [text[begin : begin + 9000] for begin in range(0, 54_000, 9000)]
    made = []
    for _ in range(count):
        page = chance.choice(pages)[: chance.choice([400, 1500, 3000, 6000])]
        made.append((f"{page}\n\nQuestion {chance.randrange(5)}:", chance.choice([8, 24, 60])))
    return made


@pytest.mark.parametrize("streams", ["one buffer", "a buffer each"])
def test_a_server_with_four_slots(serve, text: str, streams: str) -> None:
    """Mixed lengths, prompts that begin alike, a prompt cache: each step beside the host's own."""
    options = ["-np", 4, "-c", 12288]
    options += ["-kvu"] if streams == "one buffer" else ["-no-kvu"]
    server = serve("from=1024,check=1", *options)
    requests = mixed_requests(text, 160 if streams == "one buffer" else 40)
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda request: server.complete(*request), requests))
    assert all(answers)
    steps, mean, worst = compared(server.stop())
    print(f"{streams}: {steps} layers' steps, error {mean}, worst {worst}")
    assert steps > (500 if streams == "one buffer" else 150) * LAYERS
    assert mean < MEAN_ERROR
    assert worst < WORST_ERROR


def test_context_shifts(serve, text: str) -> None:
    server = serve("from=512,check=1", "-np", 1, "-c", 2048, "--context-shift")
    server.complete(text[:5000], 2500)
    log = server.stop()
    assert "context shift" in log
    steps, mean, worst = compared(log)
    assert steps > 1500 * LAYERS
    assert mean < MEAN_ERROR
    assert worst < WORST_ERROR


def test_saved_slots_come_back(serve, text: str, tmp_path: Path) -> None:
    server = serve("from=1024,check=1", "-np", 1, "-c", 4096, "--slot-save-path", tmp_path)
    first, second = text[:5000], text[20_000:25_000]
    server.complete(first, 30)
    server.ask("/slots/0?action=save", filename="first")
    server.complete(second, 30)
    server.ask("/slots/0?action=restore", filename="first")
    server.complete(first + " and", 30)
    server.ask("/slots/0?action=erase")
    server.complete(second + " or", 30)
    _, mean, worst = compared(server.stop())
    assert mean < MEAN_ERROR
    assert worst < WORST_ERROR


def test_many_clients_of_llama_parallel(model: Path, plugin: Path) -> None:
    arguments = ["-m", model, "-t", 2, "-c", 8192, "-np", 4, "-ns", 16, "-n", 60, "--temp", 0]
    log = run(
        "llama-parallel", *arguments, "-fa", "on", "-v", plugin=plugin, settings="from=256,check=1"
    )
    _, mean, worst = compared(log)
    assert mean < MEAN_ERROR
    assert worst < WORST_ERROR


def test_flash_attention_stays_on_by_itself(model: Path, plugin: Path, text: str) -> None:
    """`-fa auto` asks who computes attention before there is a cache, and would turn it off."""
    arguments = ["-m", model, "-t", 2, "-c", 4096, "-fa", "auto", "--temp", 0, "-n", 40, "-no-cnv"]
    log = run(
        "llama-completion",
        *arguments,
        "-v",
        "-p",
        text[:6000],
        plugin=plugin,
        settings="from=1024,check=1",
    )
    assert compared(log)[0] >= 30 * LAYERS


def test_prompts_that_are_over_give_their_memory_back(serve, text: str) -> None:
    server = serve("from=1024", "-np", 1, "-c", 4096)
    for page in range(24):
        server.complete(text[:1100] + text[2500 * page : 2500 * page + 10_000], 4)
    shares = re.findall(r"pariskv: .* MiB, (\d+) % of the cache", server.stop())
    print(f"summaries over the KV cache: {shares} %")
    assert shares
    assert int(shares[-1]) <= 20


def test_without_flash_attention_the_log_says_so(model: Path, plugin: Path, text: str) -> None:
    arguments = ["-m", model, "-t", 2, "-c", 4096, "-fa", "off", "--temp", 0, "-n", 8, "-no-cnv"]
    log = run("llama-completion", *arguments, "-v", "-p", text[:6000], plugin=plugin)
    assert "pariskv: left to the host: no attention reads this cache in place" in log
    assert "layers' steps" not in log


def test_settings_that_make_no_sense_leave_the_host_alone(model: Path, plugin: Path) -> None:
    log = run(
        "llama-completion",
        "-m",
        model,
        "-t",
        2,
        "-n",
        4,
        "-no-cnv",
        "-p",
        "One, two,",
        plugin=plugin,
        settings="gate=7",
    )
    assert "not used: [PARISKV_GGML] names: expected some of check" in log
