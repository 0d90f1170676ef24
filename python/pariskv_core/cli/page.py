"""An HTML page of where a step looked. It needs nothing from elsewhere, and no script."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pariskv_core.cli.errors import sentence
from pariskv_core.cli.text import count

if TYPE_CHECKING:
    from pariskv_core.cli.look import Look

_COLUMNS = 240  # of the map of layers
_CELL = (4, 10)
_MOST_TEXT = 40_000  # tokens; a longer text is shown by its passages alone
_LEVELS = 5  # of heat

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2230; --dim: #667085; --paper: #fff; --line: #e3e6ec;
  --heat: 214, 90, 0; --mass: 40, 90, 200; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --dim: #98a1b3; --paper: #14171d;
  --line: #2b303b; --heat: 255, 150, 60; --mass: 120, 165, 255; } }
body { margin: 2.5rem auto; max-width: 62rem; padding: 0 1.25rem; color: var(--ink);
  background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); font-size: .9rem; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0; }
.numbers b { display: block; font-size: 1.4rem; font-weight: 600; }
.bar { display: flex; height: 14px; border-radius: 3px; overflow: hidden; background: var(--line); }
.bar i { display: block; }
svg { width: 100%; height: auto; display: block; }
svg rect.f { fill: var(--line); } svg rect { fill: rgb(var(--heat)); }
svg rect.m { fill: rgb(var(--mass)); } svg text { fill: var(--dim); font: 9px system-ui; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td, th { text-align: left; vertical-align: top; padding: .45rem .8rem .45rem 0;
  border-top: 1px solid var(--line); } th { color: var(--dim); font-weight: 500; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
mark { color: inherit; background: rgba(var(--heat), .35); border-radius: 2px; }
.text { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 4px; padding: 1rem; max-height: 36rem;
  overflow-y: auto; }
.text span { border-radius: 2px; }
.r { color: var(--dim); text-decoration: underline dotted; }
"""


def _levels() -> str:
    return "".join(
        f".h{i} {{ background: rgba(var(--heat), {i / _LEVELS * 0.75:.2f}); }}\n"
        for i in range(1, _LEVELS + 1)
    )


def _map(seen: Look) -> str:
    """Layers from top to bottom, positions from left to right; last, full attention's mass."""
    width, height = _CELL
    columns = min(_COLUMNS, seen.tokens)
    rows = len(seen.layers)
    counts = np.stack([seen.bins(seen.selections(layer), columns) for layer in seen.layers])
    most = max(float(counts.max()), 1.0)
    left, total = 26, columns * width + 26
    parts = [f'<rect class="f" x="{left}" width="{columns * width}" height="{rows * height}"/>']
    for row, layer in enumerate(seen.layers):
        if row % max(rows // 8, 1) == 0:
            parts.append(f'<text x="0" y="{row * height + 8}">{layer.layer}</text>')
        for column, value in enumerate(counts[row]):
            if value:
                opacity = 0.15 + 0.85 * (float(value) / most) ** 0.5
                parts.append(
                    f'<rect x="{left + column * width}" y="{row * height}" width="{width}" '
                    f'height="{height - 1}" fill-opacity="{opacity:.2f}"/>'
                )
    begin, end = seen.zone
    mass = seen.mass.copy()
    mass[:begin] = mass[end:] = 0
    bars = seen.bins(mass, columns)
    top, tall = rows * height + 8, 40
    for column, value in enumerate(bars):
        size = tall * float(value) / max(float(bars.max()), 1e-30)
        parts.append(
            f'<rect class="m" x="{left + column * width}" y="{top + tall - size:.1f}" '
            f'width="{width - 1}" height="{size:.1f}"/>'
        )
    for share in (0, 0.25, 0.5, 0.75, 1):
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        parts.append(
            f'<text x="{left + share * columns * width:.0f}" y="{top + tall + 12}" '
            f'text-anchor="{anchor}">{share * seen.tokens:,.0f}</text>'
        )
    box = f"0 0 {total} {top + tall + 16}"
    return f'<svg viewBox="{box}" role="img" aria-label="Selected rows">{"".join(parts)}</svg>'


def _heat(seen: Look) -> list[int]:
    """A level for each token: by how many layers and kv heads selected it, on a log scale."""
    selected = seen.selected.astype(np.float64)
    scaled = np.log1p(selected) / max(np.log1p(float(selected.max())), 1e-30)
    levels = np.where(selected > 0, np.ceil(_LEVELS * scaled), 0)
    return [int(level) for level in np.minimum(levels, _LEVELS)]


def _text(seen: Look, pieces: list[str]) -> str:
    """Neighbours of one kind share an element."""
    levels, (begin, end) = _heat(seen), seen.zone
    kinds = [
        f"h{level}" if level else ("" if begin <= place < end else "r")
        for place, level in enumerate(levels)
    ]
    parts, place = [], 0
    while place < len(pieces):
        last = place
        while last < len(pieces) and kinds[last] == kinds[place]:
            last += 1
        text = escape("".join(pieces[place:last]))
        kind = kinds[place]
        parts.append(f'<span class="{kind}">{text}</span>' if kind else text)
        place = last
    return "".join(parts)


def _passages(found: dict[str, Any]) -> str:
    rows = [
        f'<tr><td class="n">{passage["hottest"]:,}</td>'
        f'<td class="n">{passage["selected"]} of {found["searches"]}</td>'
        f'<td class="n">{passage["mass"]:.1%}</td><td>{escape(passage["before"])}'
        f"<mark>{escape(passage['token'])}</mark>{escape(passage['after'])}</td></tr>"
        for passage in found["passages"]
    ]
    head = "<tr><th>position</th><th>selected by</th><th>mass</th><th>text</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _shares(shares: dict[str, float]) -> str:
    named = (
        ("resident", "on the first tokens and the window", "--dim"),
        ("selected", "on selected rows", "--heat"),
        ("elsewhere", "elsewhere: estimated by the tail", ""),
    )
    numbers, bars = [], []
    for name, said, colour in named:
        numbers.append(f"<div><b>{shares[name]:.1%}</b>{said}</div>")
        ink = f"rgb(var({colour}))" if colour == "--heat" else f"var({colour})"
        if colour:
            bars.append(f'<i style="width:{100 * shares[name]:.2f}%;background:{ink}"></i>')
    return (
        "<p>Full attention's mass of this step lies</p>"
        f'<div class="numbers">{"".join(numbers)}</div><div class="bar">{"".join(bars)}</div>'
    )


def page(found: dict[str, Any], seen: Look, pieces: list[str]) -> str:
    """pieces: the text of each token that was stored when the step looked."""
    continued, chose = escape(found["continued"].strip()), escape(found["chose"].strip())
    body = [
        f"<h1>Where the step looked that chose “{chose}”</h1>",
        f'<p class="dim">{escape(found["model"])}, {count(found["tokens"], "token")}</p>',
        f"<p>… {continued}</p>",
    ]
    if not found["searched"]:
        body.append("<p>It attended to every token: so short a text is not searched.</p>")
    else:
        body += [
            _shares(found["shares"]),
            *([] if seen.errors is None else [f"<p>{sentence(seen.errors, 'The step')}</p>"]),
            "<h2>Selected rows, by layer and position</h2>",
            _map(seen),
            '<p class="dim">Above: layers from top to bottom; the darker, the more kv heads '
            "selected rows there. Below: full attention's mass between the first tokens and the "
            "window.</p>",
            "<h2>Passages</h2>",
            _passages(found),
        ]
        if seen.tokens <= _MOST_TEXT:
            body += [
                "<h2>The text</h2>",
                '<p class="dim">The darker, the more layers and kv heads selected the token. '
                "Underlined: always attended to.</p>",
                f'<div class="text">{_text(seen, pieces[: seen.tokens])}</div>',
            ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the step looked that chose “{chose}”</title>"
        f"<style>{_STYLE}{_levels()}</style></head>\n<body>\n{chr(10).join(body)}\n</body></html>\n"
    )
