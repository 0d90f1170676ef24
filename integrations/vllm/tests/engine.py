"""One engine of vLLM in a process of its own: reads a job as JSON, writes what came of it.

A job: {"engine": arguments of vllm.LLM, "work": names of functions here, in order, ...}.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from tiny_models import PICTURE, VOCABULARY

Prompt = list[int]


def prompt(seed: int, tokens: int) -> Prompt:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(tokens)]


def counters(worker: Any) -> dict[str, Any]:
    """Runs in each rank."""
    from pariskv_core.vllm import ranks

    found = ranks.of(worker.vllm_config)
    layers = worker.vllm_config.compilation_config.static_forward_context
    attention = {
        name: type(getattr(layer, "impl", layer)).__name__
        for name, layer in layers.items()
        if hasattr(layer, "get_attn_backend")  # none of experts
    }
    if found is None:
        return {"attention": sorted(set(attention.values()))}
    rank = found.rank
    stats = rank.cache.stats()
    return {
        "attention": attention,
        "layers": sorted(found.layers),
        "decode_tokens": stats.decode_tokens,
        "searched_tokens": stats.searched_tokens,
        "forks": rank.sequences.forks,
        "sequences": len(rank.cache.sequences()),
        "row_bytes": stats.row_bytes,
        "live_bytes": stats.memory.live,
        "kv_dtype": rank.cache.config.kv_dtype,
        "policy": type(rank.cache.config.policy).__name__,
    }


def answer(output: Any) -> dict[str, Any]:
    """What came of a prompt, and by how much each token led the next likely one."""
    [first, *_] = output.outputs
    ranked = [sorted((one.logprob for one in few.values()), reverse=True) for few in first.logprobs]
    return {
        "prompt": hashlib.sha256(str(output.prompt_token_ids).encode()).hexdigest(),
        "tokens": list(first.token_ids),
        "gaps": [best - second for best, second, *_ in ranked],
    }


class Run:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.job = job
        self.llm = LLM(**job["engine"])
        self.work = ""
        self.found: dict[str, Any] = {"begin": self.counted()}

    def counted(self) -> list[dict[str, Any]]:
        return self.llm.collective_rpc(counters)

    def metric(self, name: str) -> float:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def generate(self, prompts: list[Any], tokens: int = 24, **options: Any) -> list[Any]:
        """prompts  tokens, or what vLLM takes in place of them"""
        from vllm import SamplingParams

        settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, **options}
        if self.job.get("gaps"):
            settings["logprobs"] = 2
        done = self.llm.generate(
            [one if isinstance(one, dict) else {"prompt_token_ids": one} for one in prompts],
            SamplingParams(max_tokens=tokens, **settings),
            use_tqdm=False,
        )
        self.told = [output.kv_transfer_params for output in done]
        self.cached = sum(output.num_cached_tokens or 0 for output in done)
        self.keep_answers(done)
        return [[list(one.token_ids) for one in output.outputs] for output in done]

    def keep_answers(self, done: list[Any]) -> None:
        """With how sure of itself the model was, where that is asked for."""
        if self.job.get("gaps"):
            self.found.setdefault("answers", {}).setdefault(self.work, []).extend(map(answer, done))

    # Work. Each returns what has to be the same with and without the plugin.

    def ragged(self) -> Any:
        lengths = (5, 40, 300, 600, 1, 2, 64, 128, 129, 1000, 2000, 1537)
        return self.generate([prompt(i, tokens) for i, tokens in enumerate(lengths)])

    def ragged_again(self) -> Any:
        """With prefixes of the first round, as far as their blocks are still there."""
        return self.ragged()

    def shared(self) -> Any:
        """Prompts that begin alike, at once: some find what is computed in the same step.

        A longer one before them takes the first steps, in which all of them arrive.
        """
        document = prompt(100, 420)
        asked = [prompt(99, 1000)]
        asked += [document + prompt(101 + i, tokens) for i, tokens in enumerate((5, 9, 70, 3, 33))]
        tokens = self.generate([*asked, document, document[:200] + prompt(120, 90)])
        self.found["shared_cached"] = self.cached
        return tokens

    def samples(self) -> Any:
        return self.generate([prompt(200, 150), prompt(201, 31)], n=3, temperature=0.9, seed=7)

    def stopped(self) -> Any:
        """Answers that end by a token, then prompts that go on with them: with asynchronous
        scheduling one token more was computed behind each end."""
        asked = [prompt(250 + i, tokens) for i, tokens in enumerate((100, 63, 62, 61, 200))]
        ends = list(range(3, VOCABULARY, 7))
        first = self.generate(asked, 60, ignore_eos=False, stop_token_ids=ends)
        lengths = {len(answer) for [answer] in first}
        assert min(lengths) < 60, "none was stopped"
        pairs = zip(asked, first, strict=True)
        again = [begin + answer + prompt(260, 70) for begin, [answer] in pairs]
        return [first, self.generate(again, 20, ignore_eos=False, stop_token_ids=ends)]

    def preempted(self) -> Any:
        """More tokens than there are blocks: the last requests are put off again and again."""
        tokens = self.generate([prompt(300 + i, 340 + i) for i in range(8)], 90)
        self.found["preemptions"] = self.metric("vllm:num_preemptions")
        return tokens

    def aborted(self) -> Any:
        """Requests that end in the middle of a prompt and of an answer, others that go on."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        settings = SamplingParams(
            max_tokens=40,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if self.job.get("gaps") else None,
        )
        lengths = {"long": 2000, "short": 30, "stays": 500, "follows": 310}
        for number, (name, tokens) in enumerate(lengths.items()):
            engine.add_request(name, {"prompt_token_ids": prompt(400 + number, tokens)}, settings)
        ended: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = output
            steps += 1
            if steps == 2:
                engine.abort_request(["long"])
            if steps == 6:
                engine.abort_request(["short"])
        done = [ended[name] for name in ("stays", "follows")]
        self.keep_answers(done)
        return [list(output.outputs[0].token_ids) for output in done]

    def told_errors(self) -> Any:
        """Of answers of some lengths, beside their tokens."""
        lengths = (300, 1400, 2000, 40)
        tokens = self.generate([prompt(700 + i, count) for i, count in enumerate(lengths)])
        self.found["told"] = self.told
        return tokens

    def many(self) -> Any:
        """Short requests that have nothing in common."""
        return self.generate([prompt(1000 + i, 3 + i % 60) for i in range(120)], 4)

    def pictures(self) -> Any:
        """One text with two pictures, each before it, behind a beginning, and both: twice."""
        import numpy as np
        from PIL import Image

        chance = np.random.default_rng(5)
        some = [
            Image.fromarray(chance.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(2)
        ]
        begin, text = prompt(500, 300), prompt(501, 700)
        begin, text = ([min(token, PICTURE - 2) for token in one] for one in (begin, text))
        asked = []
        for one in some:
            asked.append(([PICTURE, *text], [one]))
            asked.append(([*begin, PICTURE, *text[:40]], [one]))
            asked.append(([*begin, PICTURE, *text[:90], PICTURE, 7], [one, some[0]]))
        prompts: list[Any] = [
            {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
            for tokens, images in asked
        ]
        settings = self.llm.llm_engine.vllm_config.model_config.multimodal_config
        self.found["takes_missing_pictures"] = bool(settings.allow_missing_mm_embeddings)
        return [self.generate([*prompts, begin]), self.generate(prompts)]

    def embedded(self) -> Any:
        """Prompts that come as embeddings, some of which begin alike: twice."""
        import torch

        size = self.llm.llm_engine.model_config.get_hidden_size()
        chance = torch.Generator().manual_seed(5)

        def some(tokens: int) -> torch.Tensor:
            return 0.1 * torch.randn(tokens, size, generator=chance)

        begin = some(300)
        asked = [
            {"prompt_embeds": torch.cat([*([begin] if i % 2 else []), some(50 + 200 * i)])}
            for i in range(6)
        ]
        return [self.generate(asked), self.generate(asked)]

    # Work of a pretrained model over a long text.

    def facts(self) -> list[bool]:
        """Of six facts in a document of 6,600 tokens, which are found."""
        from pariskv_core.cli.document import FACTS, with_facts
        from vllm import SamplingParams

        tokenizer = self.llm.get_tokenizer()
        document = with_facts(6600, lambda text: len(tokenizer(text)["input_ids"]))
        prompts = [f"{document}\n\n{fact.question}\n{fact.begin}" for fact in FACTS]
        settings = SamplingParams(max_tokens=12, temperature=0)
        done = self.llm.generate(prompts, settings, use_tqdm=False)
        pairs = zip(done, FACTS, strict=True)
        return [fact.answer in output.outputs[0].text for output, fact in pairs]

    def distributions(self) -> list[int]:
        """Of the second token after each of some long prompts: the first is the prompt's."""
        import numpy as np
        from vllm import SamplingParams

        tokenizer = self.llm.get_tokenizer()
        tokens = tokenizer(Path(self.job["text"]).read_text())["input_ids"][:7000]
        prompts = [{"prompt_token_ids": tokens[: 6000 + 40 * i]} for i in range(24)]
        settings = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, ignore_eos=True)
        done = self.llm.generate(prompts, settings, use_tqdm=False)
        size = self.llm.llm_engine.model_config.get_vocab_size()
        found = np.full((len(done), size), -np.inf, np.float32)
        for row, output in zip(found, done, strict=True):
            for token, entry in output.outputs[0].logprobs[1].items():
                row[token] = entry.logprob
        np.save(self.job["distributions"], found)
        return [output.outputs[0].token_ids[0] for output in done]

    def reset(self) -> None:
        """No prefix is left, so nothing is."""
        assert self.llm.reset_prefix_cache()
        for _ in range(100):  # the workers are told in a step of its own
            self.found["after_reset"] = self.counted()
            if not any(rank.get("sequences") for rank in self.found["after_reset"]):
                break


def schedule_asynchronously() -> None:
    """As vLLM does on GPUs; on a CPU its platform turns that off when a configuration is made."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        checked(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("asynchronous"):
        schedule_asynchronously()
    run = Run(job)
    for name in job["work"]:
        run.work = name
        run.found[name] = getattr(run, name)()
    run.found["end"] = run.counted()
    scheduler = run.llm.llm_engine.vllm_config.scheduler_config
    run.found["asynchronous"] = bool(scheduler.async_scheduling)
    Path(sys.argv[2]).write_text(json.dumps(run.found))


if __name__ == "__main__":
    main()
