"""Models of random weights, a few layers of the layout of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1920  # a multiple of 64 that three ranks can part
PICTURE = 1901  # the token that stands for one
# Heads that can be parted among two ranks and among three.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
GATED: dict[str, Any] = {  # delta rule
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def make_tiny(folder: Path) -> Path:
    """A Llama of three layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(**{**TEXT, "intermediate_size": 384}, num_hidden_layers=3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_mixed(folder: Path, kind: str) -> Path:
    """A model of four to nine layers, of which two are of full attention, or of linear ones one."""
    import torch
    import transformers as hf

    torch.manual_seed(3)
    shape = {**TEXT, "sliding_window": 96}
    sliding, full = "sliding_attention", "full_attention"
    model: Any
    if kind == "gemma3":
        layers = [sliding, sliding, full] * 2
        config = hf.Gemma3TextConfig(
            **shape, num_hidden_layers=6, layer_types=layers, query_pre_attn_scalar=64
        )
        model = hf.Gemma3ForCausalLM(config)
    elif kind == "gemma4":
        # Full layers have other heads, and values that are their keys; the last three layers share
        # keys and values of those before.
        config = hf.Gemma4TextConfig(
            **shape,
            num_hidden_layers=9,
            layer_types=[sliding, sliding, full] * 3,
            global_head_dim=128,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            num_kv_shared_layers=3,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=16,
        )
        model = hf.Gemma4ForCausalLM(config)
    elif kind == "qwen3next":
        del shape["sliding_window"]
        config = hf.Qwen3NextConfig(
            **shape,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + [full],
            mlp_only_layers=[0, 1, 2],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            **GATED,
        )
        model = hf.Qwen3NextForCausalLM(config)
    elif kind in _STATES:
        return _with_states(folder, kind)
    else:
        config = hf.GptOssConfig(
            **shape,
            num_hidden_layers=4,
            layer_types=[sliding, full] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        model = hf.GptOssForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.data.normal_()
    model.float().save_pretrained(folder)
    return folder


_OF_HIDDEN_SIZE = {"num_attention_heads": 3, "num_key_value_heads": 3}  # heads of 64 dimensions
_STATES = ("qwen35", "jamba", "nemotron_h", "lfm2")


def _with_states(folder: Path, kind: str) -> Path:
    """Layers of a gated delta rule, of Mamba's two versions, of convolutions, beside full ones."""
    import transformers as hf

    linear, full = "linear_attention", "full_attention"
    config: Any
    model: Any
    if kind == "qwen35":
        config = hf.Qwen3_5TextConfig(
            **TEXT,
            num_hidden_layers=4,
            layer_types=[linear] * 3 + [full],
            **GATED,
        )
        model = hf.Qwen3_5ForCausalLM(config)
    elif kind == "jamba":
        config = hf.JambaConfig(
            **{**TEXT, **_OF_HIDDEN_SIZE},
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=16,
            mamba_dt_rank=16,  # kernels read eight numbers at a time
        )
        model = hf.JambaForCausalLM(config)
    elif kind == "nemotron_h":
        config = hf.NemotronHConfig(
            **TEXT,
            layers_block_type=[linear, "mlp", full, "mlp", linear, "mlp"],
            mamba_num_heads=6,
            mamba_head_dim=64,
            n_groups=2,
            ssm_state_size=32,
            chunk_size=64,
        )
        model = hf.NemotronHForCausalLM(config)
    else:
        config = hf.Lfm2Config(
            **{**TEXT, **_OF_HIDDEN_SIZE},
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            block_multiple_of=64,
            # As vLLM reads them, of older configurations.
            conv_dim=TEXT["hidden_size"],
            block_dim=TEXT["hidden_size"],
        )
        model = hf.Lfm2ForCausalLM(config)
    model.float().save_pretrained(folder)
    return folder


def make_seeing(folder: Path) -> Path:
    """A model of texts and pictures: 64 pixels square make 16 tokens."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(3)
    text = {**TEXT, "model_type": "llama", "num_hidden_layers": 3}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "initializer_range": 0.1,
    }
    config = hf.Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=PICTURE,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    hf.Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)

    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    special += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    words = {f"t{number}": number for number in range(PICTURE - 1)}
    words |= {name: PICTURE - 1 + number for number, name in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessorPil(
            size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
        ),
        tokenizer=hf.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="t3",
            eos_token="t1",
            pad_token="t2",
            additional_special_tokens=special,
        ),
        image_seq_len=16,
    ).save_pretrained(folder)
    return folder
