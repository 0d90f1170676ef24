"""Saved caches: a generation goes on after a load as if it had never been interrupted."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pariskv_core as pk
import pariskv_core.transformers as pkt
import pytest
import torch
from tiny import DENSE, SEARCHING, check_use, distinct, generated, model, prompt, ragged

FAMILIES = ["llama", "gemma3_text", "gpt_oss", "gemma3n_text", "gemma4_text"]
FAMILIES += ["qwen3_next", "lfm2", "bamba"]  # whose other layers keep states


def cache_of(made: Any, settings: dict[str, Any], **more: Any) -> pkt.PariskvCache:
    return pkt.PariskvCache(made.config, **settings, **more)


def longer(inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What generate is given when it goes on after `tokens`."""
    new = tokens.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1)
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["one", "ragged"])
def test_a_generation_goes_on_as_if_never_interrupted(family, rows, settings, tmp_path):
    made = model(family)
    inputs = prompt() if rows == "one" else ragged()
    whole = generated(made, inputs, cache_of(made, settings), max_new_tokens=40)
    cache = cache_of(made, settings)
    first = generated(made, inputs, cache, max_new_tokens=15)
    cache.save(tmp_path / "saved")
    loaded = pkt.PariskvCache.load(tmp_path / "saved", made.config)
    assert loaded.get_seq_length() == cache.get_seq_length()
    rest = generated(made, longer(inputs, first), loaded, max_new_tokens=25)
    assert torch.equal(rest, whole)
    assert distinct(rest, inputs["input_ids"].shape[1]) >= 20
    loaded.engine.calls["prefill"] = loaded.engine.config.layers  # it was of the other cache
    check_use(loaded, inputs)
    # The saved one goes on, too, and so does a copy of what was loaded.
    assert torch.equal(generated(made, longer(inputs, first), cache, max_new_tokens=25), whole)
    again = copy.deepcopy(pkt.PariskvCache.load(tmp_path / "saved", made.config))
    assert torch.equal(generated(made, longer(inputs, first), again, max_new_tokens=25), whole)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_columns_are_taken_back_from_a_loaded_cache(family, settings, tmp_path):
    made, inputs = model(family), prompt()
    cache = cache_of(made, settings, rollback=True)
    first = generated(made, inputs, cache, max_new_tokens=12)
    cache.save(tmp_path)
    loaded = pkt.PariskvCache.load(tmp_path, made.config)
    outs = []
    for either in (cache, loaded):
        either.crop(-7)
        outs.append(generated(made, longer(inputs, first[:, :-7]), either, max_new_tokens=30))
    assert torch.equal(*outs)
    assert distinct(outs[0], 60) >= 20


def test_other_settings_of_the_search_may_be_given(tmp_path):
    made, inputs = model("llama"), prompt()
    cache = cache_of(made, SEARCHING)
    first = generated(made, inputs, cache, max_new_tokens=5)
    cache.save(tmp_path)
    policy = SEARCHING["policy"].replace(top_k=7)
    loaded = pkt.PariskvCache.load(tmp_path, made.config, policy=policy, local=9)
    assert loaded.engine.config.policy.top_k == 7
    generated(made, longer(inputs, first), loaded, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"\[load\] path: expected .* policy.seed 1 as this one"):
        pkt.PariskvCache.load(tmp_path, made.config, policy=policy.replace(seed=1))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, pkt.PariskvCache, Path]:
    made = model("gemma3_text")
    cache = cache_of(made, SEARCHING)
    generated(made, ragged(), cache, max_new_tokens=5)
    cache.save(tmp_path / "saved")
    return made, cache, tmp_path / "saved"


def test_a_folder_is_replaced_and_has_no_old_files(saved):
    made, cache, folder = saved
    before = {p.name for p in folder.iterdir()}
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.save(folder)
    after = {p.name for p in folder.iterdir()}
    assert before & after == {"cache.json"} and len(before) == 5 and len(after) == 4
    loaded = pkt.PariskvCache.load(folder, made.config)
    lengths = [cache.engine.length(s) for s in cache.sequences]
    assert [loaded.engine.length(s) for s in loaded.sequences] == lengths


def test_a_save_that_fails_leaves_the_old_cache(saved, monkeypatch):
    made, cache, folder = saved
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    save = type(cache.engine).save
    files: list[Any] = []

    def full(self: pk.Cache, sequence: int, path: Any) -> None:
        files.append(path)
        if len(files) == 3:
            raise OSError(28, "no space left on the device")
        save(self, sequence, path)

    monkeypatch.setattr(type(cache.engine), "save", full)
    for target in (folder, folder.parent / "new"):
        files.clear()
        with pytest.raises(OSError, match="no space left"):
            cache.save(target)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["saved"]
    assert pkt.PariskvCache.load(folder, made.config).get_seq_length() == cache.get_seq_length()


@pytest.fixture
def umask() -> Any:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def _modes(folder: Path) -> set[str]:
    return {oct(path.stat().st_mode & 0o7777) for path in folder.iterdir()}


def test_a_private_cache_stays_private_and_a_new_one_follows_the_umask(saved, umask):
    _, cache, folder = saved
    for old in ("row-*.pkv", "layers-*", "cache.json"):  # what one file forbids, all forbid
        for path in folder.iterdir():
            path.chmod(0o644)
        next(folder.glob(old)).chmod(0o600)
        umask(0)
        cache.save(folder)
        assert _modes(folder) == {"0o600"}
    for mask, mode in ((0o022, "0o644"), (0o077, "0o600")):
        umask(mask)
        cache.save(folder.parent / mode)
        assert _modes(folder.parent / mode) == {mode}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other owners")
def test_a_saved_cache_keeps_its_owner(saved):
    _, cache, folder = saved
    for path in folder.iterdir():
        path.chmod(0o640)
        os.chown(path, 1234, 4321)
    cache.save(folder)
    assert _modes(folder) == {"0o640"}
    assert {(p.stat().st_uid, p.stat().st_gid) for p in folder.iterdir()} == {(1234, 4321)}


def test_links_are_followed(saved):
    made, cache, folder = saved
    link = folder.parent / "link"
    link.symlink_to("target")  # not there yet
    for _ in range(2):
        cache.save(link)
        assert link.is_symlink() and len(list((folder.parent / "target").iterdir())) == 5
    (folder / "cache.json").rename(folder.parent / "elsewhere")
    (folder / "cache.json").symlink_to("../elsewhere")
    before = (folder.parent / "elsewhere").read_bytes()
    cache.save(folder)
    assert (folder / "cache.json").is_symlink()
    assert (folder.parent / "elsewhere").read_bytes() != before
    assert pkt.PariskvCache.load(folder, made.config).get_seq_length() == cache.get_seq_length()


def test_damage_is_refused_wherever_it_is(saved):
    made, _, folder = saved
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            damaged = bytearray(whole)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="path: expected"):
                pkt.PariskvCache.load(folder, made.config)
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match="path: expected"):
            pkt.PariskvCache.load(folder, made.config)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            pkt.PariskvCache.load(folder, made.config)
        path.write_bytes(whole)
    pkt.PariskvCache.load(folder, made.config)


def test_what_cannot_be_is_refused_in_a_sentence(saved, tmp_path):
    made, cache, folder = saved
    with pytest.raises(ValueError, match="expected model_type gemma3_text, as the model of the"):
        pkt.PariskvCache.load(folder, model("llama").config)
    config = copy.deepcopy(made.config)
    config.num_key_value_heads = 4
    with pytest.raises(ValueError, match=r"expected num_key_value_heads 2, as .*got 4"):
        pkt.PariskvCache.load(folder, config)
    with pytest.raises(ValueError, match="expected tokens to save, got a cache without any"):
        cache_of(made, DENSE).save(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"expected a new or empty folder.*other files"):
        cache.save(tmp_path / "other")
    with pytest.raises(NotADirectoryError, match="expected a folder or nothing, got a file"):
        cache.save(tmp_path / "other" / "mine.txt")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "a" / "b")
    with pytest.raises(FileNotFoundError):
        pkt.PariskvCache.load(tmp_path / "other", made.config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "saved"]
    manifest = json.loads((folder / "cache.json").read_text())
    (folder / "cache.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(ValueError, match="expected version 1 of saved caches, got 2"):
        pkt.PariskvCache.load(folder, made.config)
