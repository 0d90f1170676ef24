"""What the pages of other programs say in figures: see figures.py."""

from __future__ import annotations

from collections.abc import Iterator

from sources import noted, results, short

VLLM_STEPS = {  # stock vLLM and with the engine
    "32,000 × 1": ("7.74", "8.06"),
    "32,000 × 14": ("25.59", "13.33"),
    "130,000 × 1": ("12.05", "8.28"),
    "130,000 × 3": ("23.54", "9.92"),
    "16,000 × 28": ("25.65", "17.42"),
}
VLLM_MORE = {  # another day's: "–" is not measured
    "4,000 × 64": ("17.55", "19.22", "1.10"),
    "130,000 × 6, `int8_per_token_head`": ("–", "11.76", "–"),
    "130,000 × 12, `int8_per_token_head`": ("–", "14.89", "–"),
}
VLLM_DAY = {  # in the order of the loads
    "one prompt of 1,000 tokens at a time": "one_1k",
    "of 16,000": "one_16k",
    "of 48,000": "one_48k",
    "128 prompts of 1,000, a token each": "many_prompts",
    "chat: 256 requests, 128 at once, 100 to 4,000 in, 200 out": "chat",
    "128 requests of 2,000 in, 256 out, 64 at once": "medium",
    "agents: 12 of 4 turns, 20,000 in common, 10,000 of their own, 1,500 more a turn": "agents",
    "10 of 48,000 beside 40 of 1,000, 256 out": "mixed",
}
VLLM_LATER = {  # decode graphs, as vLLM compiles, and eager
    "a text of 120,000 tokens, 64 questions at once, 512 out": "document",
    "40 of 48,000 at once, 256 out": "forty",
    "60 of 100 to 60,000, few of them long, that come by themselves, 128 out": "tail",
    "200, 32 at once, 60 % of which begin as one of twenty texts, 100 out": "prefixes",
    "8 conversations of 20 turns, 1,000 in and 100 out a turn": "conversation",
    "400 of 1,000 at once, 128 out": "short",
    "chat": "chat",
    "128 of 2,000, 256 out, 64 at once": "medium",
}


def llama_cpp() -> Iterator[str]:
    noted("tried", "4,096 tokens 20.0 / 22.1 / 17.2,")
    noted("tried", "on two threads .95 to .97 of")
    yield "| 4,096 | f16 | 20.0 | 17.2 | 1.16 × with `from=4096`, .95 on another machine"
    noted("tried", "8,192 tokens 30.1 / 31.7 / 15.8.")
    yield "| SmolLM2-135M | 8,192 | f16 | 30.1 | 15.8 | 1.9 × |"
    noted("tried", "Qwen-1.5B, 32,768 tokens: 198.8 / 297.6 / 47.8, q8_0 – / 412.5 / 48.8.")
    yield "| Qwen2.5-Coder-1.5B | 32,768 | f16 | 199 | 48 | 4.2 × |"
    yield "| Qwen2.5-Coder-1.5B | 32,768 | q8_0 | 413 | 49 | 8.5 × |"
    noted("tried", "131,072 tokens: f16 83.6 / 437 / 3.71,")
    yield "f16, at 131,072 tokens: 84 ms in llama.cpp, 3.7 in the plugin"


def vllm() -> Iterator[str]:
    for case, (stock, ours) in VLLM_STEPS.items():
        over = f"{float(ours) / float(stock):.2f}".removeprefix("0")
        noted("vllm", f"| {case} | {stock} | {ours} | {over} |")
        all_that_fit = ", all that fit vLLM's own cache" if case == "130,000 × 3" else ""
        yield f"| {case}{all_that_fit} | {stock} | {ours} |"
    for case, (stock, ours, over) in VLLM_MORE.items():
        noted("vllm", f"| {case} | {stock} | {ours} | {over} |")
        named = case.replace("`int8_per_token_head`", "rows in 8 bits")
        yield f"| {named} | {stock} | {ours} |"
    noted("tried", "attended to in full / searched: 1 × 12K 46 / 53,")
    noted("tried", "8 × 12K 172 / 114,")
    noted("tried", "16 × 12K 314 / 155,")
    yield "16 requests of 12K tokens take 314 and 155 µs, 8 take 172 and 114 µs"
    yield "one takes 46 and 53 µs"
    noted("vllm", "Tokens a second, stock / engine: 387 / 1,315 (target 3 ×),")
    yield "answers of 512 tokens, served: 1,315 tokens a second, and 387 by vLLM alone"
    noted("vllm", "seconds to the first token 6.3 / 6.6.")
    yield "6.6\nand 6.3 seconds to the first token"
    noted("vllm", "Two H200s: 760 / 1,977 and 3.0 / 4.1.")
    noted("vllm", "| 130,000 × 3, two H200s | 9.60 | 6.29 | .66 |")
    yield "1,977 and 760 tokens a second, 4.1 and 3.0 seconds to\nthe first token"
    yield "3 requests of 130,000 tokens take 6.29 ms a step, and 9.60 in vLLM alone"
    noted("vllm", "The document, answers of 256: 359 / 1,050 tokens a second.")
    yield "questions come at 1,050 tokens a second, and at 359 by vLLM alone"
    for named, load in VLLM_DAY.items():
        roomy, full = (day_of(load, utilization) for utilization in ("0.92", "0.53"))
        yield f"| {named} | {roomy} | {full} |"
    for named, load in VLLM_LATER.items():
        ways = ("0.53, later", "0.53 --defaults", "0.53 --enforce-eager")
        yield f"| {named} | {' | '.join(day_of(load, way) for way in ways)} |"
    again = "chat .91, .72 and ten of 48,000 beside forty .97, 1.14, with a pause of 1.8 seconds"
    found = results("served-nvidia-h200")["0.53, again"]
    assert [day_of(load, "0.53, again") for load in found] == [".91, .72", ".97, 1.14"]
    assert short(found["mixed"]["ours"]["longest_pause"], 1) == "1.8"
    yield again
    qwen = results("served-nvidia-h200")["Qwen3.6-27B's shape, 0.9"]
    for load, digits, said in (
        ("medium", 0, "{} tokens a second, and {}"),
        ("long", 1, "{}, and\n  {}"),
    ):
        rates = (qwen[load][engine]["tokens_per_second"] for engine in ("ours", "stock"))
        yield said.format(*(f"{rate:.{digits}f}" for rate in rates))
    noted("vllm", "one prompt of 4,000 .474 / .520 s to the first token, and .510")
    yield "one prompt of 4,000 .51 s to the first token, and .47"
    noted("vllm", "the 36th of 40 first tokens after 89.5 of stock's 103 s")
    yield "103\nseconds, the 36th has its first token after 90"
    noted("vllm", "340 steps of 128 decoding requests: 11.52 ms, stock 11.05;")
    yield "A step of 128 short requests takes 11.5 ms, and\n11.05 in stock vLLM"
    noted("vllm", "33 steps of 8,192 tokens: 24.1 µs a token, stock 24.0;")
    yield "8,192 tokens of prompts take 197 and 196 ms"
    noted("vllm", "Of two servers: 1.43, .70.")
    yield "another two had 1.43, .70"
    noted(
        "vllm",
        "Gemma-3-12B's shape, 24 layers, .53: one 16,000 .426 / .426 s; medium 2,640 / 2,628",
    )
    yield "16,000 tokens .426 s to the first token, and .426; 128 requests of 2,000 tokens 2,628"
    noted("vllm", "tokens a second; mixed 706 / 739;")
    yield "ten of 48,000 beside forty of\n1,000 739, and 706"


def day_of(load: str, utilization: str) -> str:
    """Of a load that is served: tokens a second and first token, over stock vLLM's."""
    found = results("served-nvidia-h200")[utilization].get(load)
    if found is None:
        return "–"
    ours, stock = found["ours"], found["stock"]
    over = (ours[key] / stock[key] for key in ("tokens_per_second", "first"))
    return ", ".join(short(ratio, 2) for ratio in over)
