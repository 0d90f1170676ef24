"""Trains the lab's language model for a fixed time, from short contexts to 33,792 bytes.

python -m quality.train --seconds 330 --out model.pt
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quality import text
from quality.device import fastest_attention, precision
from quality.model import Model, Shape

SCORED = 1024  # bytes at the end of a held-out zone that are scored, whatever the context

_REPORT_SECONDS = 5.0
_CHECK_SECONDS = 25.0
_WARM_UP_SECONDS = 150.0


@dataclass(frozen=True)
class Plan:
    shape: Shape = field(default_factory=Shape)
    seconds: float = 330.0
    # (share of the time after which it begins, bytes of context)
    phases: tuple[tuple[float, int], ...] = ((0.0, 2048), (0.62, 8192), (0.8, 33_792))
    tokens_per_step: int = 65_536
    matrix_rate: float = 2e-3
    other_rate: float = 4e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    seed: int = 0
    contexts: tuple[int, ...] = (2048, 8192, 32_768)  # that bits per byte are taken at

    def context(self, progress: float) -> int:
        return [length for begin, length in self.phases if progress >= begin][-1]

    def rate(self, progress: float) -> float:
        """Of the full learning rates: up within 1 % of the time, down in a line from 40 % on."""
        return min(1.0, progress / 0.01 + 0.01, (1 - progress) / 0.6 + 0.005)


TINY = Plan(
    shape=Shape(
        layers=2, width=32, query_heads=4, kv_heads=2, head_dim=64, hidden=64, normed_layers=1
    ),
    seconds=3.0,
    phases=((0.0, 64), (0.5, 128)),
    tokens_per_step=512,
    contexts=(64, 128),
)


def _say(line: str) -> None:
    print(line, flush=True)


class Batches:
    """Random stretches of the training text."""

    def __init__(self, corpus: np.ndarray, plan: Plan, device: str) -> None:
        self._corpus = torch.from_numpy(corpus.copy()).to(device)
        self._random = torch.Generator().manual_seed(plan.seed)
        self._tokens = plan.tokens_per_step

    def next(self, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and what follows each of them, (batch, context) int64."""
        count = max(1, self._tokens // context)
        last = len(self._corpus) - context - 1
        starts = torch.randint(last, (count, 1), generator=self._random).to(self._corpus.device)
        places = starts + torch.arange(context + 1, device=self._corpus.device)
        taken = self._corpus[places].long()
        return taken[:, :-1], taken[:, 1:]


@torch.no_grad()
def bits_per_byte(model: Model, zones: Tensor, context: int, device: str, scored: int) -> float:
    """Of the last bytes of each zone, given `context` bytes and more before them."""
    model.eval()
    window = zones[:, -(context + scored) :].long()
    losses = []
    for part in window.split(max(1, 140_000 // window.shape[1])):
        with precision(device), torch.compiler.set_stance("force_eager"):
            logits = model(part[:, :-1], last=scored)
        losses.append(
            F.cross_entropy(logits.flatten(0, 1), part[:, -scored:].flatten(), reduction="none")
        )
    model.train()
    return float(torch.cat(losses).mean()) / math.log(2)


def _loss(model: Model, inputs: Tensor, targets: Tensor, device: str) -> Tensor:
    with precision(device):
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _warm_up(model: Model, batches: Batches, plan: Plan, device: str, compiled: bool) -> bool:
    """One turn at every length, so that no training time goes to compiling; says if it compiled."""
    begin = time.perf_counter()
    if compiled:
        for layer in model.layers:
            layer.compile(dynamic=False)
    try:
        for _, context in plan.phases:
            _loss(model, *batches.next(context), device).backward()
            model.zero_grad(set_to_none=True)
            taken = time.perf_counter() - begin
            _say(f"warm-up at {context} bytes: {taken:.0f} s so far, compiled: {compiled}")
            if compiled and taken > _WARM_UP_SECONDS:
                raise TimeoutError("compiling takes too long")
    except Exception as error:
        if not compiled:
            raise
        _say(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        for layer in model.layers:
            layer._compiled_call_impl = None
        return _warm_up(model, batches, plan, device, compiled=False)
    return compiled


def _optimizers(model: Model, plan: Plan, device: str) -> list[torch.optim.Optimizer]:
    """Matrices of the layers by Muon, the rest by AdamW; both keep their full rate as `full`."""
    inside = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    ids = {id(weight) for weight in inside}
    rest = [weight for weight in model.parameters() if id(weight) not in ids]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, plan.other_rate, (0.9, 0.95), weight_decay=0.0, fused=device.startswith("cuda")
        ),
        torch.optim.Muon(
            inside, plan.matrix_rate, plan.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
    ]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["full"] = group["lr"]
    return made


def train(
    plan: Plan, corpus: np.ndarray, zones: Tensor, device: str, compiled: bool
) -> tuple[Model, dict[str, Any]]:
    """The model after `plan.seconds`, and how it went. Zones (zones, bytes) uint8 on the device."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    scored = min(SCORED, plan.contexts[0])
    model = Model(plan.shape, plan.dropout).to(device).train()
    batches = Batches(corpus, plan, device)
    compiled = _warm_up(model, batches, plan, device, compiled)
    optimizers = _optimizers(model, plan, device)
    curve: list[dict[str, float]] = []
    checks: list[dict[str, float]] = []
    begin = reported = checked = time.perf_counter()
    step = tokens = 0
    recent: list[float] = []
    while (elapsed := time.perf_counter() - begin) < plan.seconds:
        progress = elapsed / plan.seconds
        context = plan.context(progress)
        inputs, targets = batches.next(context)
        loss = _loss(model, inputs, targets, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full"] * plan.rate(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + inputs.numel()
        recent.append(loss.item() / math.log(2))  # waits, so that the clock is the GPU's too
        if not math.isfinite(recent[-1]):
            raise FloatingPointError(f"the loss is {recent[-1]} at step {step}")
        now = time.perf_counter()
        if now - checked > _CHECK_SECONDS:
            at = bits_per_byte(model, zones, plan.contexts[0], device, scored)
            checks.append({"seconds": now - begin, "bits_per_byte": at})
            _say(f"{now - begin:5.0f} s: held out {at:.4f} bits per byte at {plan.contexts[0]}")
            checked = time.perf_counter()
        if now - reported > _REPORT_SECONDS or step == 1 or now - begin >= plan.seconds:
            point = {
                "seconds": now - begin,
                "step": step,
                "tokens": tokens,
                "context": context,
                "bits_per_byte": sum(recent) / len(recent),
            }
            curve.append(point)
            _say(", ".join(f"{name} {value:.4g}" for name, value in point.items()))
            recent, reported = [], now
    how = {"steps": step, "tokens": tokens, "compiled": compiled, "curve": curve, "checks": checks}
    return model, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="weights; a .json beside them says how it went"
    )
    parser.add_argument("--seconds", type=float, help="of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--installed", type=float, default=0.0, metavar="MB", help="text of installed packages too"
    )
    parser.add_argument(
        "--dropout", type=float, help="0.1 when left out and there is little text, else 0"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    arguments = parser.parse_args()
    started = time.perf_counter()
    device = arguments.device
    plan = replace(TINY if arguments.tiny else Plan(), seed=arguments.seed)
    if arguments.seconds is not None:
        plan = replace(plan, seconds=arguments.seconds)
    length = plan.contexts[-1] + min(SCORED, plan.contexts[0])
    zones = text.held_out_zones(length)[: 4 if arguments.tiny else None]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    with fastest_attention(device) as kernel:
        _say(f"attention by {kernel}, {len(zones)} held-out zones of {length} bytes")
        corpus = text.training_text(int(1e6 * arguments.installed))
        dropout = (
            (0.1 if len(corpus) < 24e6 else 0.0) if arguments.dropout is None else arguments.dropout
        )
        plan = replace(plan, dropout=dropout)
        _say(f"{len(corpus) / 1e6:.1f} MB to train on, dropout {dropout}")
        held_out = torch.from_numpy(np.stack([zone.text for zone in zones])).to(device)
        compiled = device.startswith("cuda") and not arguments.eager
        model, report = train(plan, corpus, held_out, device, compiled)
        model.save(arguments.out)
        report |= {"plan": asdict(plan), "training_bytes": len(corpus), "attention": kernel}
        report["machine"] = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
        scored = min(SCORED, plan.contexts[0])
        report["bits_per_byte"] = {
            str(context): bits_per_byte(model, held_out, context, device, scored)
            for context in plan.contexts
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1))
        _say(f"bits per byte by context: {report['bits_per_byte']}")
    _say(f"done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
