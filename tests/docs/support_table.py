"""The README's support table, found out by trying. Run with --write to put it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pariskv_core as pk
import torch

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN = "<!-- support: written by tests/docs/support_table.py -->\n"
END = "<!-- /support -->"

DTYPES = ["float32", "float16", "bfloat16"]
HEAD_DIMS = sorted({*pk.HEAD_DIMS, 32, 160, 1024})
VALUE_DIMS = [(192, 128), (64, 512), (512, 64), (128, 32)]  # head_dim, value_dim
GROUPS = [(8, 1), (2, 3), (2, 4), (1, 16), (2, 17), (1, 32)]  # kv heads, queries of each
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-3}


def works(
    dtype: str = "float32",
    head_dim: int = 64,
    value_dim: int = 0,
    kv_heads: int = 2,
    group: int = 4,
    **policy: object,
) -> bool:
    """Whether a searched step equals float64 attention over the rows it says it attends to."""
    torch.manual_seed(0)
    try:
        cache = pk.Cache(
            pk.Config(
                layers=1,
                query_heads=kv_heads * group,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=dtype,
                local=16,
                dense_below=0,
                threads=1,
                policy=pk.ParisKV(top_k=32, tail="none", **policy),  # type: ignore[arg-type]
            )
        )
    except ValueError:
        return False
    kind = getattr(torch, dtype)
    k, v = (torch.randn(321, kv_heads, dim).to(kind) for dim in (head_dim, value_dim or head_dim))
    q = torch.randn(1, kv_heads * group, head_dim).to(kind)
    sequence = cache.add()
    cache.prefill(0, [sequence], k[:320], v[:320])
    out = cache.decode(0, [sequence], q, k[320:], v[320:])[0]

    chosen = torch.from_numpy(cache.explain(0, sequence, q[0]).positions.copy())
    seen = torch.zeros(kv_heads, 321, dtype=torch.bool).scatter_(1, chosen, True)
    regions = cache.regions(sequence)
    seen[:, : regions.sink] = seen[:, regions.sink + regions.retrieval :] = True
    queries = q[0].double().view(kv_heads, group, head_dim)
    logits = torch.einsum("hgd,nhd->hgn", queries, k.double()) * head_dim**-0.5
    weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    exact = torch.einsum("hgn,nhd->hgd", weights, v.double()).flatten(0, 1)
    return bool((out.double() - exact).abs().max() < TOLERANCE[dtype])


def refused(policy: pk.ParisKV | pk.HardKV | pk.PRKV, device: str) -> bool:
    """Whether it is the policy that a cache on this device is refused for."""
    model = {"layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 64}
    try:
        pk.Cache(pk.Config(**model, policy=policy, device=device))
    except (ValueError, RuntimeError) as error:
        return "policy" in str(error)
    return False


def rows() -> Iterator[tuple[str, str]]:
    def mark(name: object, supported: bool) -> str:
        return str(name) if supported else f"~~{name}~~"

    yield "dtype", ", ".join(mark(dtype, works(dtype=dtype)) for dtype in DTYPES)
    yield "head_dim", ", ".join(mark(dim, works(head_dim=dim)) for dim in HEAD_DIMS)
    yield (
        "head_dim / value_dim",
        ", ".join(mark(f"{k}/{v}", works(head_dim=k, value_dim=v)) for k, v in VALUE_DIMS),
    )
    yield (
        "query heads / kv heads",
        ", ".join(mark(f"{h * g}/{h}", works(kv_heads=h, group=g)) for h, g in GROUPS),
    )
    yield (
        "scorer",
        ", ".join(mark(f"`{name}`", works(scorer=name)) for name in ("sign_norm", "votes")),
    )
    yield (
        "group_rule",
        ", ".join(
            mark(f"`{name}`", works(group_rule=name)) for name in ("attention_mass", "mean_query")
        ),
    )
    policies = {
        "ParisKV": pk.ParisKV(),
        "HardKV": pk.HardKV(),
        'HardKV(placement="dropped")': pk.HardKV(placement="dropped"),
        "PRKV": pk.PRKV(),
    }
    yield (
        "policy",
        "; ".join(
            f"`{name}` on "
            + ", ".join(mark(device, not refused(policy, device)) for device in ("cpu", "cuda"))
            for name, policy in policies.items()
        ),
    )
    yield "backend", "cpu, cuda"  # the second in a build with nvcc: README, Install


def table() -> str:
    lines = ["| | tried here; ~~struck out~~: refused with a sentence |", "|---|---|"]
    lines += [f"| {name} | {values} |" for name, values in rows()]
    return "\n".join(lines) + "\n"


def present() -> str:
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.stdout.write(table())
    else:
        text = README.read_text(encoding="utf-8")
        README.write_text(text.replace(BEGIN + present(), BEGIN + table()), encoding="utf-8")
