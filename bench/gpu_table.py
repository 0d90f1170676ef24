"""The table of a GPU run: targets, measurements, and the limits of the memory."""

from __future__ import annotations

from typing import Any

import harness
from gpu_source import KV_HEADS

ROW_BYTES = 512
# Microseconds: (target, a better one, target in times of torch).
_TARGETS = {
    (1, 32_768): (30, 25, 1.35),
    (1, 131_072): (36, 30, 3.5),
    (1, 524_288): (55, 45, 8.5),
    (1, 1_048_576): (85, 66, 11),
    (8, 32_768): (139, 114, None),
    (8, 131_072): (183, 151, None),
    (8, 524_288): (351, 289, None),
}
# Of placement="auto": microseconds, or at most so many times torch.
_AUTO_TARGETS: dict[tuple[int, int], tuple[int | None, float | None]] = {
    (1, 4096): (None, 1.3),
    (1, 8192): (None, 1.3),
    (1, 16_384): (None, 1.15),
    (1, 32_768): (50, None),
    (1, 131_072): (60, None),
    (8, 8192): (None, 1.05),
    (8, 32_768): (115, None),
    (8, 131_072): (185, None),
    (16, 32_768): (210, None),
    (64, 2048): (None, 1.05),
    (64, 4096): (None, 1.05),
    (64, 8192): (400, None),
    (64, 16_384): (420, None),
    (256, 2048): (None, 1.05),
}
_ROW_TARGETS = {(1, 2048): (230, 110)}
# The floor: launches, rows over the bus, and from the GPU's memory per key and head what the
# coarse score reads and leaves (20.4 bytes), 82 bytes of each of up to 4,096 candidates, and the
# resident rows.
_NODES_MICROSECONDS = 5 * 2
_BUS_SHARE = 0.92  # of the bus, for reads of single rows
_SCAN_BYTES, _CANDIDATE_BYTES, _CANDIDATES, _RESIDENT = 20.4, 82, 4096, 4 + 256 + 256
_SHARE_TARGETS = {"sign_norm": 0.7, "votes": 0.55}


def floor(tokens: int, batch: int, top_k: int, rates: dict[str, float]) -> float:
    """Microseconds that a step cannot be quicker than, by this plan."""
    heads = batch * KV_HEADS
    bus = heads * top_k * ROW_BYTES / (_BUS_SHARE * rates["from_host"])
    near = heads * (
        tokens * _SCAN_BYTES + min(_CANDIDATES, tokens) * _CANDIDATE_BYTES + _RESIDENT * ROW_BYTES
    )
    return _NODES_MICROSECONDS + 1e6 * (bus + near / rates["copy"])


def _size(tokens: int) -> str:
    return "1M" if tokens == 1 << 20 else f"{tokens // 1024}K"


def _decode_row(result: dict[str, Any], rates: dict[str, float]) -> list[str]:
    tokens, batch = result["tokens"], result["batch"]
    target, better, times = _TARGETS.get((batch, tokens), (None, None, None))
    ours, dense = result["microseconds"], result.get("dense")
    least = floor(tokens, batch, 100, rates)
    return [
        f"{batch} × {_size(tokens)}",
        f"{ours:.1f}",
        "" if target is None else f"{target}",
        "" if better is None else f"{better}",
        f"{least:.0f}",
        f"{ours / least:.2f} ×",
        "does not fit" if dense is None else f"{dense:.0f}",
        "" if dense is None else f"{dense / ours:.2f} ×",
        "" if times is None else f"{times} ×",
        result.get("dense_by", ""),
    ]


def _show_decode(results: dict[str, Any]) -> None:
    rates = results["bandwidths"]
    harness.show(
        "A decode step of one layer, K and V in host memory, µs",
        [
            "batch × tokens",
            "ours",
            "target",
            "better",
            "floor",
            "ours /",
            "torch",
            "torch /",
            "target",
            "by",
        ],
        [_decode_row(result, rates) for result in results["decode"]],
        "CUDA graph, cold caches, a new query each time, every row over the bus (row_cache=0), "
        "medians. An empty graph takes "
        f"{results['empty_graph_microseconds']:.1f}, which is in all numbers. The GPU copies "
        f"{rates['copy'] / 1e9:,.0f} GB/s, the bus brings {rates['from_host'] / 1e9:.1f} and takes "
        f"{rates['to_host'] / 1e9:.1f}.",
    )


def _auto_row(result: dict[str, Any]) -> list[str]:
    tokens, batch = result["tokens"], result["batch"]
    microseconds, times = _AUTO_TARGETS.get((batch, tokens), (None, None))
    ours, dense = result["microseconds"], result.get("dense")
    target = f"{microseconds}" if times is None else f"{times} × torch"
    return [
        f"{batch} × {_size(tokens)}",
        f"{ours:.1f}",
        "does not fit" if dense is None else f"{dense:.0f}",
        "" if dense is None else f"{ours / dense:.2f} ×",
        "" if microseconds is None and times is None else f"≤ {target}",
        f"{result['live_share']:.2f}",
        f"{result['reserved_share']:.2f}",
    ]


def _show_auto(results: dict[str, Any]) -> None:
    harness.show(
        'A decode step of one layer, placement="auto", µs',
        ["batch × tokens", "ours", "torch", "/ torch", "target", "memory / K and V", "reserved"],
        [_auto_row(result) for result in results["auto"]],
        "CUDA graph, cold caches, a new query each time, medians. Rows lie on the GPU, which has "
        "room for all of them. memory: what the cache holds, over K and V alone; reserved: with "
        "what it has taken ahead.",
    )


def _mixture_row(result: dict[str, Any]) -> list[str]:
    alone, together = result["alone"], result["together"]
    return [
        " and ".join(f"{count} × {_size(tokens)}" for count, tokens in result["parts"]),
        " + ".join(f"{part:.0f}" for part in alone),
        f"{together:.0f}",
        f"{together / sum(alone):.2f} ×",
        "≤ 1 ×",
    ]


def _show_mixtures(results: dict[str, Any]) -> None:
    harness.show(
        'Long and short sequences in one batch, placement="auto", µs',
        ["sequences", "each part alone", "one batch", "/ their sum", "target"],
        [_mixture_row(result) for result in results["mixtures"]],
        "As above. Parts alone are decided by their own number of sequences, the batch by its own.",
    )


def _rows_row(results: list[dict[str, Any]]) -> list[str]:
    """Of one batch and top_k."""
    by = {(r["queries"], "without" if r["row_cache"] == 0 else "with"): r for r in results}
    first, steady = results[0], by["steady", "with"]
    target = _ROW_TARGETS.get((first["batch"], first["top_k"]))
    columns = [(q, c) for q in ("new", "steady") for c in ("without", "with")]
    return [
        f"{first['batch']} × {_size(first['tokens'])}, {first['top_k']:,}",
        *(f"{by[column]['microseconds']:.1f}" for column in columns),
        "" if target is None else f"{target[0]} / {target[1]}",
        f"{100 * steady['overlap']:.0f} %",
        f"{100 * steady['found_share']:.0f} %",
    ]


def _show_rows(results: dict[str, Any]) -> None:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for result in results["rows"]:
        groups.setdefault((result["batch"], result["top_k"]), []).append(result)
    harness.show(
        "Rows that are selected again, and the row cache, µs",
        [
            "batch × tokens, rows a head",
            "new rows, none",
            "with",
            "most again, none",
            "with",
            "target",
            "again",
            "found",
        ],
        [_rows_row(group) for group in groups.values()],
        "none: row_cache=0, every row comes over the bus; with: the default, twice top_k. new "
        "rows: a query of its own in each step; most again: queries that keep so much of the one "
        "before that a step selects 4 of 5 of its rows again. again: the share of rows that are, "
        "counted on the queries measured; found: the share that the row cache had. target: every "
        "row cold, and 80 % selected before.",
    )


def _show_flushes(results: dict[str, Any]) -> None:
    rows = []
    for name in ("eager", "graph"):
        walked = results["flushes"][name]
        for clock, label in {"wall": "host", "device": "GPU"}.items():
            times, far, flushing = (walked[clock][key] for key in ("all", "far", "flushing"))
            middle = times["median"]
            rows.append(
                [
                    f"{name}, {label}",
                    *(f"{1e6 * times[key]:.1f}" for key in ("median", "p99.9", "slowest")),
                    f"{times['p99.9'] / middle:.2f} ×",
                    f"{far['p99.9'] / middle:.2f} ×",
                    f"{walked['flushes']}",
                    f"{flushing['median'] / middle:.2f} ×",
                    f"{flushing['slowest'] / middle:.2f} ×",
                ]
            )
    harness.show(
        f"Steps across flushes, one by one, {_size(results['flushes']['tokens'])}, µs",
        [
            *("", "median", "p99.9", "slowest", "p99.9 / median", "far from them"),
            *("flushes", "median", "slowest"),
        ],
        rows,
        "Target: p99.9 of a step at most 1.5 times the median. Far from them: the same quotient "
        "of steps more than 64 after a flush, which is what the machine does by itself. The last "
        "two columns: steps that flush, over the median of all.",
    )


def _show_prefill(results: dict[str, Any]) -> None:
    rows = []
    bus = results["bandwidths"]["to_host"]
    for result in results["prefill"]:
        call, work, whole = (result[f"{name}_seconds"] for name in ("call", "own_work", "whole"))
        moved = result["offloaded_bytes"]
        rows.append(
            [
                result["placement"],
                f"{1e3 * call:.2f}",
                f"{1e3 * work:.2f}",
                f"{1e3 * whole:.2f}",
                f"{moved / whole / 1e9:.1f}" if moved else "",
                f"{100 * moved / whole / bus:.0f} %" if moved else "",
            ]
        )
    harness.show(
        "Prefill of one layer, 128K tokens, ms",
        ["rows go to", "the call", "its work", "with offload", "GB/s", "of the bus"],
        rows,
        "Target: offload at 90 % of the bus, hidden behind the next layer.",
    )


def _show_attend(results: dict[str, Any]) -> None:
    rows = []
    for result in results["attend"]:
        dense = result.get("dense")
        rows.append(
            [
                f"{result['queries']:,} × {result['tokens']:,}",
                f"{1e-3 * result['exact']:.2f}",
                f"{1e-3 * result['fast']:.2f}",
                f"{1e-3 * dense:.2f}" if dense else "",
                result.get("dense_by", ""),
                f"{result['fast'] / dense:.2f}" if dense else "",
            ]
        )
    harness.show(
        "Attention of several tokens at once, one sequence, rows on the GPU, ms",
        ["tokens × context", "exact", "fast", "torch, no mask", "by", "fast / torch"],
        rows,
        "Target: fast in at most 1.15 times the time of the best of torch's.",
    )


def _verb_row(line: dict[str, Any], rates: dict[str, float]) -> list[str]:
    taken = line["microseconds"]
    over_bus = line["verb"] in ("fetch", "offload", "choose, rows far")
    rate = line["bytes"] / (1e-6 * taken)
    peer = rates["to_host" if line["verb"] == "offload" else "from_host"]
    peer = peer if over_bus else rates["copy"]
    share = 100 * rate / peer
    target = ""
    if line["verb"] in ("score", "scan") and line["tokens"] == 1 << 20 and line["batch"] == 1:
        target = f"{100 * _SHARE_TARGETS[line['scorer']]:.0f} %"
    elif line["verb"] == "encode":
        target = "175 µs" if line["tokens"] == 131_072 else ""
    elif line["verb"] == "digest":
        target = "150 µs" if line["tokens"] == 131_072 else ""
    elif line["verb"] == "offload":
        target = "90 %"
    return [
        f"{line['verb']} {line.get('scorer', '')}".strip(),
        f"{line['batch']} × {_size(line['tokens'])}",
        f"{taken:.1f}",
        f"{line['until_microseconds']:.1f}" if "until_microseconds" in line else "",
        f"{line['bytes'] / 1e6:.1f}",
        f"{rate / 1e9:,.0f}" if line["bytes"] else "",
        f"{share:.0f} % {'bus' if over_bus else 'copy'}" if line["bytes"] else "",
        target,
    ]


def _show_verbs(results: dict[str, Any]) -> None:
    harness.show(
        "Verbs one by one, µs",
        ["verb", "size", "alone", "so far", "MB", "GB/s", "share of", "target"],
        [_verb_row(line, results["bandwidths"]) for line in results["verbs"]],
        "Cold caches. alone: a launch of its own; so far: one launch of all steps up to this one. "
        "MB: what the verb has to move.",
    )


def show(results: dict[str, Any]) -> None:
    parts = {
        "decode": _show_decode,
        "auto": _show_auto,
        "mixtures": _show_mixtures,
        "rows": _show_rows,
        "prefill": _show_prefill,
        "attend": _show_attend,
        "flushes": _show_flushes,
        "verbs": _show_verbs,
    }
    for section, part in parts.items():
        if results.get(section):
            part(results)
