"""How good a choice of rows is, against full attention and the best rows of the same number.

All of one kv head and its group, for many steps at once; shapes as in methods.py. Every mass is a
share of the attention over everything, the resident rows included.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quality.methods import logits_of, oracle_rows, step_chunks


@dataclass
class Quality:
    """Per step; `summary` has the numbers to report."""

    recall: Tensor  # (steps): share of the best rows that were chosen
    mass: Tensor  # (steps, group): attention on the chosen rows
    best_mass: Tensor  # (steps, group): attention on the best rows for the group
    lse_error: Tensor  # (steps): full log-sum-exp less that of what is attended to, mean of heads
    output_error: Tensor | None = None  # (steps): |output - full| / |full|, over all heads

    def share(self) -> Tensor:
        """(steps): the group's mass on the chosen rows over that on the best ones."""
        best = self.best_mass.mean(dim=1)
        return torch.where(best > 0, self.mass.mean(dim=1) / best, 1.0)

    def head_shares(self) -> Tensor:
        """(group): the share of each head.

        A head's mass over all steps is held against its own mass on the rows that are best for the
        group. Summed before it is divided: a head that needs nothing from the zone at some step has
        no say there.
        """
        best = self.best_mass.sum(dim=0)
        return torch.where(best > 0, self.mass.sum(dim=0) / best, 1.0)

    def worst_head(self) -> float:
        """The share of the head that fares worst."""
        return self.head_shares().min().item()

    def summary(self) -> dict[str, float]:
        found = {
            "recall": self.recall.mean().item(),
            "share": self.share().mean().item(),
            "worst_head": self.worst_head(),
            "mass": self.mass.mean().item(),
            "lse_error": self.lse_error.mean().item(),
        }
        if self.output_error is not None:
            found["output_error"] = self.output_error.mean().item()
        return found

    @staticmethod
    def joined(parts: list[Quality]) -> Quality:
        """Steps after steps."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Quality)}
        return Quality(
            **{n: None if c[0] is None else torch.cat(c) for n, c in columns.items()}  # type: ignore
        )


@dataclass
class Resident:
    """Attention over the rows that are attended to anyway: sinks and local window."""

    lse: Tensor  # (steps, group)
    output: Tensor  # (steps, group, head_dim)

    @staticmethod
    def of(queries: Tensor, keys: Tensor, values: Tensor) -> Resident:
        logits = logits_of(queries, keys)
        return Resident(torch.logsumexp(logits, dim=-1), torch.softmax(logits, dim=-1) @ values)


def recall(chosen: Tensor, best: Tensor) -> Tensor:
    """Share of the best rows (steps, rows) that are among the chosen ones: (steps)."""
    wanted = (best >= 0).sum(dim=1).clamp(min=1)
    width = int(max(chosen.max(), best.max())) + 1
    marks = torch.zeros(len(best), width + 1, dtype=torch.bool)
    # What is padded marks the last place, which is not looked at.
    marks.scatter_(1, torch.where(chosen < 0, width, chosen), True)
    found = marks.gather(1, best.clamp(min=0)) & (best >= 0)
    return found.sum(dim=1) / wanted


def measure(
    queries: Tensor,
    keys: Tensor,
    chosen: Tensor,
    resident: Resident | Tensor,
    values: Tensor | None = None,
    best: Tensor | None = None,
) -> Quality:
    """The quality of `chosen` (steps, rows), indices into keys, -1 for none.

    resident  of the queries; its log-sum-exps (steps, group) alone will do without values
    values    (tokens, head_dim); left out, there is no output error
    best      the oracle's rows (steps, rows), if they are at hand
    """
    lse = resident.lse if isinstance(resident, Resident) else resident
    if best is None:
        best = oracle_rows(queries, keys, chosen.shape[1], lse)
    parts = []
    for chunk in step_chunks(len(queries), queries.shape[1] * len(keys)):
        outputs = None
        if values is not None:
            assert isinstance(resident, Resident), "an output needs that of the resident rows"
            outputs = (values, resident.output[chunk])
        parts.append(
            _measure(queries[chunk], keys, chosen[chunk], lse[chunk], best[chunk], outputs)
        )
    return Quality.joined(parts)


def _mass_on(attention: Tensor, rows: Tensor) -> Tensor:
    """Attention (steps, group, tokens) on rows (steps, rows): (steps, group, rows)."""
    index = rows.clamp(min=0)[:, None].expand(-1, attention.shape[1], -1)
    return attention.gather(2, index) * (rows >= 0)[:, None]


def _measure(
    queries: Tensor,
    keys: Tensor,
    chosen: Tensor,
    lse: Tensor,
    best: Tensor,
    outputs: tuple[Tensor, Tensor] | None,
) -> Quality:
    logits = logits_of(queries, keys)
    everything = torch.logaddexp(lse, torch.logsumexp(logits, dim=-1))
    attention = torch.exp(logits - everything[..., None])
    on_chosen = _mass_on(attention, chosen)
    mass = on_chosen.sum(dim=-1)
    on_resident = torch.exp(lse - everything)
    attended = (on_resident + mass).clamp(max=1)
    error = None
    if outputs is not None:
        values, resident_output = outputs
        inside = on_resident[..., None] * resident_output
        full = inside + attention @ values
        fetched = values[chosen.clamp(min=0)]  # (steps, rows, head_dim)
        ours = (inside + on_chosen @ fetched) / attended[..., None]
        error = (ours - full).flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1)
    return Quality(
        recall=recall(chosen, best),
        mass=mass,
        best_mass=_mass_on(attention, best).sum(dim=-1),
        lse_error=-torch.log(attended).mean(dim=1),
        output_error=error,
    )
