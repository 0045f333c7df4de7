"""The attention problems that are measured, and how many operations each counts as."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"d(\d+)(?:x(\d+))?-(full|causal)-s(\d+)-b(\d+)-h(\d+)(?:x(\d+))?")


@dataclass(frozen=True, order=True)
class Cell:
    """One self-attention problem: as many keys as queries, bfloat16."""

    d: int
    dv: int
    causal: bool
    seqlen: int
    batch: int
    heads_q: int
    heads_kv: int

    def __post_init__(self):
        if self.heads_q % self.heads_kv:
            raise ValueError(f"{self.heads_q} query heads are no multiple of {self.heads_kv}")

    def flops(self, direction: str = "forward") -> int:
        """Return the conventional count: 2 S^2 (d + dv) H B, half if causal, 2.5x backward.

        The convention of the FlashAttention papers: causal counts S^2 / 2 of the S (S + 1) / 2
        visible pairs, and the backward's five matrix products count as 2.5 forwards.
        """
        pairs = self.seqlen * self.seqlen * self.heads_q * self.batch
        forward = 2 * pairs * (self.d + self.dv) // (2 if self.causal else 1)
        if direction == "forward":
            return forward
        if direction == "backward":
            return forward * 5 // 2
        raise ValueError(f"direction is 'forward' or 'backward', not {direction!r}")

    def input_bytes(self) -> int:
        """Return the bytes of one set of (q, k, v) in bfloat16."""
        per_token = self.heads_q * self.d + self.heads_kv * (self.d + self.dv)
        return 2 * self.batch * self.seqlen * per_token

    def problem(self):
        """Return the facts of the cell's call, as flash4 plans it."""
        import torch

        from flash4.problem import AttentionProblem

        sizes = (self.batch, self.seqlen, self.seqlen, self.heads_q, self.heads_kv, self.d, self.dv)
        return AttentionProblem(torch.bfloat16, *sizes, self.causal)

    @property
    def name(self) -> str:
        """The cell as one word, such as `d192x128-causal-s8192-b2-h16`; `parse` reads it back."""
        dims = f"{self.d}" if self.d == self.dv else f"{self.d}x{self.dv}"
        heads = f"{self.heads_q}" + (f"x{self.heads_kv}" if self.heads_q != self.heads_kv else "")
        mask = "causal" if self.causal else "full"
        return f"d{dims}-{mask}-s{self.seqlen}-b{self.batch}-h{heads}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read a cell from its name."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"no cell name: {text!r}; one looks like d128-causal-s4096-b4-h16")
        d, dv, mask, seqlen, batch, heads_q, heads_kv = match.groups()
        return cls(
            d=int(d),
            dv=int(dv or d),
            causal=mask == "causal",
            seqlen=int(seqlen),
            batch=int(batch),
            heads_q=int(heads_q),
            heads_kv=int(heads_kv or heads_q),
        )


def _training() -> tuple[Cell, ...]:
    """16k tokens and hidden size 2048, as the papers measure, with one (192, 128) and one GQA."""
    tokens, lengths = 16384, (16384, 8192, 4096, 2048, 1024, 512)
    cells = []
    for d, heads, seqlens in ((128, 16, lengths), (64, 32, lengths), (256, 8, lengths[::2])):
        for causal in (False, True):
            cells += [Cell(d, d, causal, s, tokens // s, heads, heads) for s in seqlens]
    cells.append(Cell(192, 128, True, 8192, 2, 16, 16))
    cells.append(Cell(128, 128, True, 8192, 2, 32, 8))
    return tuple(cells)


TRAINING = _training()


def _mha(d: int) -> tuple[Cell, ...]:
    return tuple(c for c in TRAINING if c.d == c.dv == d and c.heads_q == c.heads_kv)


SUBSETS: dict[str, tuple[Cell, ...]] = {
    "training": TRAINING,
    "d64": _mha(64),
    "d128": _mha(128),
    "d256": _mha(256),
    "short": tuple(c for c in TRAINING if c.seqlen <= 1024),
    "causal": tuple(c for c in TRAINING if c.causal),
    # One of every head size, both masks, long and short, and the GQA cell.
    "quick": tuple(
        Cell.parse(name)
        for name in (
            "d128-full-s4096-b4-h16",
            "d128-causal-s1024-b16-h16",
            "d64-full-s1024-b16-h32",
            "d64-causal-s4096-b4-h32",
            "d256-causal-s4096-b4-h8",
            "d128-causal-s8192-b2-h32x8",
        )
    ),
}


def select(text: str) -> tuple[Cell, ...]:
    """Return the cells of a comma-separated list of subset names and cell names, each once."""
    cells: dict[Cell, None] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        if word in SUBSETS:
            cells.update(dict.fromkeys(SUBSETS[word]))
        elif _NAME.fullmatch(word):
            cells[Cell.parse(word)] = None
        else:
            known = ", ".join(SUBSETS)
            raise ValueError(
                f"{word!r} is neither a subset ({known}) nor a cell name such as {TRAINING[0].name}"
            )
    return tuple(cells)
