"""A model as a folder that vLLM reads, out of the pinned GGUF file.

python pretrained.py FOLDER [--model qwen-0.5b] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pariskv_core.cli import weights


def convert(folder: Path, model: str = "smollm2", dtype: str = "float32") -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = weights.fetch(weights.MODELS[model])
    source = {"gguf_file": path.name, "dtype": getattr(torch, dtype)}
    plain = AutoModelForCausalLM.from_pretrained(path.parent, **source)
    # The library would not save what it takes for quantised weights: they are plain by now.
    plain.hf_quantizer = None
    plain.is_quantized = False
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=weights.MODELS, default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    convert(**vars(parser.parse_args()))
