"""SmolLM2-135M as a folder that vLLM reads, out of the pinned GGUF file.

python pretrained.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(folder: Path) -> None:
    import torch
    from pariskv_core.cli import weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = weights.fetch(weights.MODELS["smollm2"])
    source = {"gguf_file": path.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **source)
    # The library would not save what it takes for quantised weights: they are plain by now.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
