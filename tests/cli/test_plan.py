"""What `plan` says is what a cache then takes, and what a file says of its model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pariskv_core as pk
import pytest
from conftest import Pariskv
from pariskv_core import _shapes as shapes
from pariskv_core._shapes import ModelShape
from pariskv_core.cli import figures, main, parsing
from pariskv_core.cli.taken import MOST_TOKENS, Taken, together
from tiny_model import save_config

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def shape(layers: int = 3, kv_heads: int = 2, head_dim: int = 64, value_dim: int = 0) -> ModelShape:
    return ModelShape("test", layers, 2 * kv_heads, kv_heads, head_dim, value_dim or head_dim)


def filled(of: ModelShape, tokens: int, batch: int, **settings: object) -> pk.Stats:
    """Statistics of a cache with so many tokens."""
    with pk.Cache(of.config(threads=1, **settings)) as cache:
        for _ in range(batch):
            sequence = cache.add()
            for layer in range(of.layers):
                k = np.zeros((tokens, of.kv_heads, of.head_dim), np.float16)
                v = np.zeros((tokens, of.kv_heads, of.value_dim), np.float16)
                cache.prefill(layer, [sequence], k, v)
        return cache.stats()


def taken(of: ModelShape, batch: int = 1, memory: int = 1 << 60, **settings: object) -> Taken:
    host = 1 << 60 if settings.get("device") else 0
    return Taken(of, of.config(**settings), batch, memory, host)


@pytest.mark.parametrize("tokens", [600, 5000, 9217])
@pytest.mark.parametrize(
    "of",
    [shape(), shape(kv_heads=8, head_dim=128), shape(1, 1, 256), shape(2, 3, 192, 128)],
    ids=str,
)
def test_a_cache_takes_the_bytes_that_were_planned(of: ModelShape, tokens: int):
    planned = taken(of, 2).parts(tokens)
    stats = filled(of, tokens, 2)
    assert planned["keys and values"].device == stats.row_bytes
    # Where the last segment is all window, its summaries do not exist yet; nor does the state of a
    # sequence without a zone. They are planned all the same, and blocks in whole cache lines.
    over = planned["key summaries"].device - stats.summary_bytes
    grows = of.config().footprint(longest=9217, sequences=0, tokens=1024)
    state = of.config().footprint(longest=tokens, sequences=2)["state"]
    lines = 64 * 2 * of.layers * 11
    assert any(0 <= over - early <= lines for early in (0, state, 2 * grows["summaries"]))


@pytest.mark.parametrize("tokens", [5000, 9217, 20_000])
def test_rows_in_8_bits_are_planned(tokens: int):
    of, settings = shape(kv_heads=2, head_dim=128), {"kv_dtype": "int8"}
    token = taken(of, **settings).per_token()
    assert token.rows == of.layers * of.kv_heads * 264
    assert token.plain == taken(of).per_token().rows
    planned = taken(of, 2, **settings).parts(tokens)
    over = planned["keys and values"].device - filled(of, tokens, 2, **settings).row_bytes
    # A window may be short, and its rows are not in the zone yet.
    config = of.config(**settings)
    window = config.local + config.update + 5 * 64
    assert 0 <= over <= 2 * window * (token.plain + token.rows)


@pytest.mark.parametrize("block", [0, 64, 256])
def test_the_policys_settings_count(block: int):
    policy = pk.ParisKV(block=block)
    planned = taken(shape(), policy=policy).parts(9000)
    over = planned["key summaries"].device
    over -= filled(shape(), 9000, 1, policy=policy).summary_bytes
    assert 0 <= over <= 64 * shape().layers * 10  # blocks are whole cache lines


def test_dropped_rows_are_planned_for_the_longest_answer():
    policy = pk.HardKV(most=200, placement="dropped")
    of = shape(layers=1)
    planned = taken(of, policy=policy).parts(1 << 20)
    rng = np.random.default_rng(0)
    most = kept = 0
    with pk.Cache(of.config(threads=1, policy=policy)) as cache:
        s = cache.add()
        # The zone begins with 1,023 tokens, and goes on to one less than a whole segment each time.
        tokens = cache.config.segment_tokens - 1 + cache.config.local
        rows = (tokens, of.kv_heads, of.head_dim)
        k, v = (rng.normal(size=rows).astype(np.float16) for _ in "kv")
        q = rng.normal(size=(tokens, of.query_heads, of.head_dim)).astype(np.float16)
        cache.prefill(0, [s], k, v, q=q)
        for step in range(3000):
            cache.decode(0, [s], q[:1], k[:1], v[:1])
            if step > 200:
                stats = cache.stats()
                most, kept = max(most, stats.row_bytes), max(kept, stats.kept_bytes)
    assert most <= planned["keys and values"].device <= 1.1 * most
    assert planned["kept rows"].device == kept
    assert taken(of, policy=policy, device="cuda").longest() == MOST_TOKENS


@pytest.mark.skipif(not pk.is_available("cuda"), reason="needs a GPU and the CUDA backend")
@pytest.mark.parametrize("placement", ["auto", "host"])
@pytest.mark.parametrize("of", [shape(kv_heads=8, head_dim=128), shape()], ids=str)
def test_a_cache_on_a_gpu_takes_what_was_planned(of: ModelShape, placement: str):
    import torch

    tokens = 40_000
    parts = taken(of, device="cuda", placement=placement).parts(tokens)
    need, called = together(parts), parts["beside, in a call"].device
    with pk.Cache(of.config(device="cuda", placement=placement)) as cache:
        sequence = cache.add()
        for each in range(of.layers):
            rows = (tokens, of.kv_heads, of.head_dim)
            k, v = (torch.randn(rows, dtype=torch.float16, device="cuda") for _ in "kv")
            cache.prefill(each, [sequence], k, v)
        for each in range(of.layers):
            q = torch.randn(1, of.query_heads, of.head_dim, dtype=torch.float16, device="cuda")
            k, v = (torch.randn(1, *rows[1:], dtype=torch.float16, device="cuda") for _ in "kv")
            cache.decode(each, [sequence], q, k, v)
        for _ in range(2):  # rows leave for host memory; any call takes note of arrivals
            torch.cuda.synchronize()
            cache.flush([])
        stats = cache.stats()
        # The sink and the window lie in three segments at most, which do not leave.
        resident = 3 * 1024 * taken(of).per_token().rows
        assert 0 <= need.host - stats.host_memory.live <= resident
        held = stats.memory.live - stats.workspace_bytes
        assert held == pytest.approx(need.device - called, rel=0.1)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_the_largest_context_fits_and_a_segment_more_does_not(device: str | None):
    of = shape(kv_heads=8, head_dim=128)
    settings = {"device": device} if device else {}
    for memory in (500_000_000, 200_000_000):
        found = taken(of, 2, memory, **settings)
        longest = found.longest()
        assert longest > 0
        assert found.fits(longest)
        assert not found.fits(longest + found.config.segment_tokens)
    assert taken(of, 1, 1000, **settings).longest() == 0
    assert taken(of, **settings).longest() == MOST_TOKENS


def test_a_largest_context_is_no_shorter_than_one_that_fits():
    of = shape(32, 8, 128)
    found = Taken(of, of.config(device="cuda"), 16, 6 * 10**9, 200 * 10**9)
    assert found.fits(7680)
    assert not found.fits(3000)  # rows of short sequences cannot leave
    assert found.longest() >= 7680


def test_rows_stay_on_a_gpu_that_has_room_for_them():
    of = shape(kv_heads=8, head_dim=128)
    [near, far] = (
        taken(of, 1, memory, device="cuda").parts(100_000)["keys and values"]
        for memory in (10**10, 10**9)
    )
    assert near.host == 0
    assert far.host > 0
    assert near.device == far.device + far.host


def _readme_rows(heading: str) -> list[list[float]]:
    table = README[README.index(heading) :].split("\n\n")[0]
    cells = [re.findall(r"[\d,.]+", row) for row in table.splitlines()[2:]]
    return [[float(cell.replace(",", "")) for cell in row] for row in cells]


def test_documented_figures_are_the_readmes():
    cpu = [
        (tokens, 1e-3 * ours, 1e-3 * dense)
        for tokens, ours, dense, _ in _readme_rows("| tokens | pariskv_core")
    ]
    assert np.allclose(figures.CPU.steps[1], cpu)
    gpu: dict[int, list[tuple[float, float, float]]] = {}
    for batch, tokens, ours, dense, _ in _readme_rows("| batch × tokens | pariskv_core"):
        gpu.setdefault(int(batch), []).append((tokens, 1e-6 * ours, 1e-6 * dense))
    assert sorted(gpu) == sorted(figures.GPU.steps)
    for batch, rows in gpu.items():
        assert np.allclose(figures.GPU.steps[batch], rows)


def test_estimated_times_are_the_documented_ones_and_grow():
    exact = figures.step(figures.GPU, 131072, 8, 8, 128)
    assert (exact.ours, exact.dense) == pytest.approx((214e-6, 1384e-6))
    between = figures.step(figures.GPU, 131072, 4, 8, 128)
    assert 55e-6 < between.ours < 214e-6
    half = figures.step(figures.CPU, 32768, 1, 4, 128)
    assert half.ours == pytest.approx(1.7e-3 / 2)
    times = [figures.step(figures.GPU, tokens, 16, 8, 128).ours for tokens in (1 << 17, 1 << 21)]
    assert 214e-6 < times[0] < times[1]


def test_a_config_says_its_shape(tmp_path: Path):
    found = shapes.read(str(save_config(tmp_path / "a")))
    width = {"hidden": 128, "intermediate": 128, "vocabulary": 300}
    assert found == ModelShape("llama", 2, 4, 2, 64, 64, context=8192, **width)
    older = save_config(tmp_path / "b", head_dim=None, num_key_value_heads=None, hidden_size=512)
    (older / "model.safetensors").write_bytes(bytes(1000))
    found = shapes.read(str(older))
    assert (found.kv_heads, found.head_dim, found.weights) == (4, 128, 1000)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    mixed = save_config(tmp_path / "c", layer_types=kinds, num_hidden_layers=3, sliding_window=512)
    found = shapes.read(str(mixed / "config.json"))
    assert (found.layers, found.sliding_layers, found.window) == (1, 2, 512)
    sharing = save_config(tmp_path / "d", num_hidden_layers=6, num_kv_shared_layers=2)
    assert shapes.read(str(sharing)).layers == 4


HYBRID = {
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}
STATE = 48 * 128 * 128 * 4 + (2 * 16 + 48) * 128 * 3 * 2  # bytes: heads, and a convolution


@pytest.mark.parametrize("form", ["fields", "per layer"])
def test_full_layers_may_have_other_heads_than_sliding_ones(tmp_path: Path, form: str):
    kinds = ["sliding_attention", "full_attention"]
    own = {"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    if form == "per layer":
        own = {"per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 1}}}
    folder = save_config(tmp_path / "a", layer_types=kinds, sliding_window=8, **own)
    found = shapes.read(str(folder))
    assert (found.layers, found.kv_heads, found.head_dim) == (1, 1, 128)
    assert (found.row_bytes, found.sliding_row) == (128 * 2 * 2, 2 * 64 * 2 * 2)


def test_linear_layers_keep_a_state(tmp_path: Path, pariskv: Pariskv):
    folder = save_config(tmp_path / "a", **HYBRID)
    found = shapes.read(str(folder))
    assert (found.layers, found.sliding_layers, found.linear_layers) == (2, 0, 6)
    assert found.state == STATE
    asked = ["plan", folder, "--context", "4096", "--device", "cpu", "--memory", "16GB"]
    assert pariskv(*asked, "--batch", "3", "--json").record["parts"]["states of linear layers"] == {
        "device": 3 * 6 * STATE,
        "host": 0,
    }
    assert "2 layers and 6 linear" in pariskv(*asked).out


def test_vllm_makes_blocks_as_large_as_a_state(tmp_path: Path, pariskv: Pariskv):
    """One request has two states in each of three groups of two layers."""
    asked = ["plan", save_config(tmp_path / "a", **HYBRID), "--context", "4096", "--vllm", "--json"]
    asked += ["--device", "cuda", "--memory", "80GB", "--host-memory", "100GB", "--weights", "1GB"]
    asked += ["--max-num-seqs", "4"]
    row = 2 * 64 * 2 * 2  # heads, numbers, K and V, bytes
    block = 128 * -(-STATE // (128 * row))
    found = pariskv(*asked).record["vllm"]
    assert found["other_layers"] == (1 + 6 + 4 * (6 + 3)) * 2 * block * row
    assert found["sequences"] == 4


def test_vllm_is_told_where_fewer_requests_leave_room_for_longer_ones(
    tmp_path: Path, pariskv: Pariskv
):
    asked = ["plan", save_config(tmp_path / "a", **HYBRID), "--context", "4096", "--vllm"]
    asked += ["--device", "cuda", "--memory", "4GB", "--host-memory", "100GB", "--weights", "1GB"]
    found = pariskv(*asked, "--json").record["vllm"]
    fewer = found["fewer"]
    assert fewer["sequences"] > found["sequences"]
    said = f"With --max-num-seqs {fewer['max_num_seqs']} it serves {fewer['sequences']} sequences."
    assert said in pariskv(*asked).out.replace("\n", " ")
    chosen = pariskv(*asked, "--json", "--max-num-seqs", str(fewer["max_num_seqs"])).record["vllm"]
    assert chosen["sequences"] == fewer["sequences"] and chosen["fewer"] is None


def test_what_a_config_leaves_out_is_asked_of_transformers(tmp_path: Path):
    """Gemma-3's configs say little, and their layers follow from their class."""
    folder = tmp_path / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", '
        '"num_hidden_layers": 12, "sliding_window": 512}}'
    )
    found = shapes.read(str(folder))
    assert (found.layers, found.sliding_layers, found.window) == (2, 10, 512)
    assert found.head_dim == 256


def test_a_gguf_file_says_its_shape(tmp_path: Path, capsys):
    from gguf import GGUFWriter

    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "gemma3")
    writer.add_block_count(12)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_context_length(32768)
    writer.add_embedding_length(640)
    writer.add_feed_forward_length(2048)
    writer.add_sliding_window(512)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = shapes.read(str(file))
    size = file.stat().st_size
    width = {"hidden": 640, "intermediate": 2048, "vocabulary": 2}
    width |= {"sliding_row": 256 * 2 * 2}
    assert found == ModelShape("gemma3", 2, 4, 1, 256, 256, 10, 512, 32768, size, **width)
    assert main(["plan", str(file), "--context", "64K", "--device", "cpu", "--memory", "16GB"]) == 0
    assert "The model was made for 32,768 tokens, fewer than these." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("64GiB", 64 << 30), ("1.5g", 1.5e9), ("800", 800)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: float):
    assert parsing.size(text) == size


@pytest.mark.parametrize(
    ("text", "number"), [("131072", 131072), ("131,072", 131072), ("128K", 131072), ("1m", 1 << 20)]
)
def test_lengths_are_read_as_people_write_them(text: str, number: int):
    assert parsing.whole(1)(text) == number
