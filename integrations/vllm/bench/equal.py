"""Greedy tokens beside stock vLLM: the engine attends to everything, so they should be the same.

    python integrations/vllm/bench/equal.py --model MODEL
    python integrations/vllm/bench/equal.py --layers 2 --tensor-parallel 2

Without a model it takes a Llama of random weights. Prompts of 5 to 9,000 tokens, four of them with
a prefix in common, two rounds, of which the second finds prefixes of the first. Where tokens part,
log-probabilities up to there say by how much both differ: in 16 bits a tie may end either way.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import GRAPHS, asked_for

LENGTHS = (5, 60, 128, 129, 700, 1000, 2048, 4097, 9000)
SHARED, TAILS = 1500, (4, 70, 130, 300)
VOCABULARY = 3000  # of prompts

Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--layers", type=int, default=2, help="of the Llama of random weights")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=9000, help="leave longer prompts out")
    parser.add_argument("--compiled", action="store_true", help="as vLLM compiles when not told")
    parser.add_argument("--engine", choices=["ours", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def random_llama(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def prompts(longest: int) -> list[list[int]]:
    chance = random.Random(5)

    def some(count: int) -> list[int]:
        return [chance.randrange(3, VOCABULARY) for _ in range(count)]

    document = some(SHARED)
    made = [some(count) for count in LENGTHS] + [document + some(count) for count in TAILS]
    return [prompt for prompt in made if len(prompt) <= longest]


def answers(chosen: argparse.Namespace) -> list[list[Answer]]:
    """Of one engine, for each round."""
    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {}
    if chosen.engine == "ours":
        own = asked_for({"dense_below": 8388608})
    llm = LLM(
        chosen.model,
        skip_tokenizer_init=True,
        dtype=chosen.dtype,
        max_model_len=chosen.longest + chosen.tokens + 64,
        max_num_seqs=8,
        gpu_memory_utilization=chosen.utilization,
        tensor_parallel_size=chosen.tensor_parallel,
        compilation_config={} if chosen.compiled else GRAPHS,
        **own,
    )
    settings = SamplingParams(
        temperature=0, max_tokens=chosen.tokens, ignore_eos=True, detokenize=False, logprobs=1
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(chosen.longest)]

    def answer(output: Any) -> Answer:
        one = output.outputs[0]
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        return list(one.token_ids), [entry[token].logprob for token, entry in pairs]

    return [
        [answer(output) for output in llm.generate(asked, settings, use_tqdm=False)]
        for _ in range(2)
    ]


def compare(stock: list[list[Answer]], ours: list[list[Answer]]) -> None:
    for number, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        same, apart = 0, 0.0
        for (tokens, scores), (own, own_scores) in zip(theirs, mine, strict=True):
            pairs = zip(tokens, own, strict=True)
            until = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
            same += until == len(tokens)
            gaps = zip(scores[:until], own_scores[:until], strict=True)
            apart = max([apart, *(abs(a - b) for a, b in gaps)])
        print(
            f"round {number + 1}: {same} of {len(theirs)} answers are the same tokens; "
            f"log-probabilities are at most {apart:.4f} apart before the others part"
        )


def main() -> None:
    chosen = arguments()
    if chosen.engine:
        chosen.out.write_text(json.dumps(answers(chosen)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = chosen.model or str(folder / "llama")
        if not chosen.model:
            random_llama(folder / "llama", chosen.layers)
        found = {}
        for engine in ("stock", "ours"):
            out = folder / engine
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--model", model, "--engine", engine, "--out", str(out)]
            subprocess.run(command, check=True)
            found[engine] = json.loads(out.read_text())
        compare(found["stock"], found["ours"])


if __name__ == "__main__":
    main()
