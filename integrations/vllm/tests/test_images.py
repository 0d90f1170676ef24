"""Prompts that are more than tokens: pictures, and embeddings."""

from __future__ import annotations

from pathlib import Path

from conftest import CONNECTOR, EXACT, ON_GPU, asked_for, check_same, run, small_engine
from tiny_models import make_seeing

PRODUCER = {"kv_transfer_config": {**CONNECTOR, "kv_role": "kv_producer"}}


def test_prompts_with_pictures_have_stocks_tokens(tmp_path: Path) -> None:
    arguments = {
        **small_engine(make_seeing(tmp_path / "model")),
        "dtype": "bfloat16" if ON_GPU else "float32",  # vLLM's kernels there round 32 bits
        "limit_mm_per_prompt": {"image": 2},
        "skip_tokenizer_init": False,
    }
    work = ["pictures", "shared", "stopped", "preempted", "aborted"]
    stock = run({"engine": arguments, "work": work}, tmp_path)
    engine = {**arguments, **asked_for(EXACT), **PRODUCER}
    ours = run({"engine": engine, "work": [*work, "reset"], "asynchronous": True}, tmp_path)
    for name in work:
        check_same(ours, stock, name)
    first, again = ours["pictures"]
    assert ON_GPU or again == first[: len(again)], "prefixes are found again"
    half = len(again) // 2  # the text is the same in both halves
    assert all(one != other for one, other in zip(again[:half], again[half:], strict=True))
    assert not ours["takes_missing_pictures"]
    [rank] = ours["end"]
    assert rank["decode_tokens"] > 0 and rank["forks"] > 0 and ours["preemptions"] > 0
    assert ours["after_reset"][0]["row_bytes"] == 0


def test_prompts_that_come_as_embeddings_have_stocks_tokens(tiny: Path, tmp_path: Path) -> None:
    arguments = {**small_engine(tiny), "enable_prompt_embeds": True}
    stock, ours = (
        run({"engine": {**arguments, **more}, "work": ["embedded", "reset"]}, tmp_path)
        for more in ({}, asked_for(EXACT))
    )
    check_same(ours, stock, "embedded")
    first, again = ours["embedded"]
    assert ON_GPU or again == first
    [rank] = ours["end"]
    assert rank["decode_tokens"] > 0 and rank["forks"] > 0
    assert ours["after_reset"][0]["row_bytes"] == 0
