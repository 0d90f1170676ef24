"""The facts of the demo, asked of a server: a document of so many tokens and six questions.

    python integrations/vllm/bench/facts.py --url http://127.0.0.1:8000 --model MODEL

Prints each answer and whether the fact is in it. Run it against stock vLLM too, and compare.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

from pariskv_core.cli.document import FACTS, with_facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="its name at the server")
    parser.add_argument("--tokens", type=int, default=6600)
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer")
    return parser.parse_args()


def ask(url: str, page: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return dict(json.loads(answer.read()))


def main() -> None:
    chosen = arguments()

    def count(text: str) -> int:
        body = {"model": chosen.model, "prompt": text}
        return int(ask(chosen.url, "tokenize", body)["count"])

    document = with_facts(chosen.tokens, count)
    found = 0
    for fact in FACTS:
        prompt = f"{document}\n\n{fact.question}\n{fact.begin}"
        body = {"model": chosen.model, "prompt": prompt, "max_tokens": chosen.answer}
        text = ask(chosen.url, "v1/completions", {**body, "temperature": 0})["choices"][0]["text"]
        found += fact.answer in text
        print(f"{'yes' if fact.answer in text else 'no':4}{text!r}")
    print(f"{found} of {len(FACTS)} facts")


if __name__ == "__main__":
    main()
