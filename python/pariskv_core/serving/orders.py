"""What the scheduler's side tells the workers: one Orders for each step of the engine.

Plain values, pickled once a step. Every rank gets the same ones, so every rank does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ADD, FORK, CUT, REMOVE, CLEAR = "add", "fork", "cut", "remove", "clear"


class Command(NamedTuple):
    """A change of sequences before the forward pass.

    kind    ADD, FORK, CUT, REMOVE, or CLEAR: all sequences go
    name    of the sequence, given by the scheduler's side and never used again
    tokens  how many stay: of a cut, or of the source in a fork
    source  of a fork
    """

    kind: str
    name: int
    tokens: int = 0
    source: int = -1


@dataclass(frozen=True)
class Row:
    """A request that is scheduled in this step."""

    request: str
    sequence: int
    stored: int  # tokens of its sequence once the commands are done
    computed: int  # tokens before its new ones; more than `stored` where rows are lost
    tokens: int  # new ones
    prompt: int  # tokens that are a prompt's, the ones of a resumed request among them

    @property
    def decodes(self) -> bool:
        """One token that the model has just made; a prompt's last token alone is a prompt."""
        return self.tokens == 1 and self.computed >= self.prompt


@dataclass(frozen=True)
class Orders:
    """
    lost  blocks whose rows are not there: the host fails the requests that have them
    """

    commands: list[Command] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
