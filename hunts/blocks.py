"""Blocks for the property tests: any attention, and errors of the user's own."""

from __future__ import annotations

import dataclasses

import torch

from hunts.attention import CHANGES, HEADS, REFUSED, SUPPORTED, WIDTH, AttentionCall, observed

Tensor = torch.Tensor


class UserError(Exception):
    """Raised inside a block by the user's own code."""


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 2), torch.nn.Linear(2, out)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.dropout(self.down(hidden)))


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    parts: tuple[tuple[str, str], ...] = (("sdpa", "video"),)  # kind of attention, and the input it attends to
    dropout: float = 0.0
    changed: str = ""  # of CHANGES, "" for none
    in_place: bool = False  # changes tensors in place that no backward needs
    adapted: bool = False  # Linear modules with low-rank adapters


class RandomAttentionBlock(torch.nn.Module):
    """A block as its spec says. failure: (where, in recompute) of a UserError that its next such call raises."""

    def __init__(self, spec: BlockSpec, place: int) -> None:
        super().__init__()
        self.spec, self.place = spec, place
        self.failure: tuple[str, bool] | None = None
        linear = Adapted if spec.adapted else torch.nn.Linear
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.projections = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"q": linear(WIDTH, WIDTH), "kv": linear(WIDTH, 2 * WIDTH), "out": linear(WIDTH, WIDTH)}
            )
            for _ in spec.parts
        )
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 12), torch.nn.Sequential(torch.nn.ReLU(inplace=spec.in_place)), linear(12, WIDTH)
        )
        self.dropout = torch.nn.Dropout(spec.dropout, inplace=spec.in_place)

    def note(self, key: Tensor, times: int = 1) -> None:
        if not torch.compiler.is_compiling():
            keys = key.shape[-2]
            observed.calls.extend([AttentionCall(self.place, keys, not observed.in_forward)] * times)

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        self.maybe_raise("begin")
        for (kind, source), projection in zip(self.spec.parts, self.projections, strict=True):
            hidden = self.norm(video)
            key, value = projection["kv"](hidden if source == "video" else text).chunk(2, dim=-1)
            heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (projection["q"](hidden), key, value)]
            if kind in SUPPORTED:
                self.note(heads[1])
            output = (SUPPORTED.get(kind) or REFUSED[kind])(self, *heads)
            if self.spec.changed:
                CHANGES[self.spec.changed](output)
            self.maybe_raise("attention")
            output = projection["out"](output.transpose(1, 2).flatten(2))
            if self.spec.in_place:
                output.mul_(0.7)
            video = video + self.dropout(output)
        video = video + self.dropout(self.ffn(self.norm(video)))
        self.maybe_raise("end")
        return video

    def maybe_raise(self, where: str) -> None:
        if self.failure is not None and self.failure == (where, not observed.in_forward):
            self.failure = None
            observed.raised = UserError(f"at the {where} of block {self.place}")
            raise observed.raised
