"""The statements that random functions are composed of, simplest first.

A statement is text: `{0}` and `{1}` stand for its operands, `{out}` and `{other}` for
its results, `{name}` for a name. Each is smooth, or has kinks only where random numbers
rarely are, and maps numbers of moderate size to numbers of moderate size. So a rounding
difference before it stays one after it, in derivatives too. All keep two dimensions.
"""

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """A name, the text, and what it needs: a key of `GROUPS`."""

    name: str
    text: str
    kind: str = "plain"

    @property
    def num_operands(self) -> int:
        """How many earlier values it reads."""
        return 2 if "{1}" in self.text else 1

    @property
    def num_results(self) -> int:
        """How many values it makes."""
        return 2 if "{other}" in self.text else 1


# Only these have derivatives whose operands are well known.
SIMPLE = (
    Statement("sin", "{out} = torch.sin({0})"),
    Statement("cos", "{out} = torch.cos({0})"),
    Statement("tanh", "{out} = torch.tanh({0})"),
    Statement("sigmoid", "{out} = torch.sigmoid({0})"),
    Statement("add", "{out} = {0} + {1}"),
    Statement("mul", "{out} = {0} * {1}"),
    Statement("name", '{out} = checkpoint_name({0}, "{name}")'),
    Statement("detach", "{out} = {0}.detach()"),
    Statement("transpose", "{out} = {0}.mT"),
)

_TABLES = {
    "plain": {
        "no_grad": "with torch.no_grad():\n    {out} = torch.cos({0})",
        "gelu": "{out} = F.gelu({0})",
        "silu": "{out} = F.silu({0})",
        "softplus": "{out} = F.softplus({0})",
        "where": "{out} = torch.where({0} > 0.1, {0}, {1})",
        "constant": "{out} = {0} * torch.arange(1.0, 2.0, 0.5)[0] + 0.25",
        "sum": "{out} = {0}.sum(-1, keepdim=True)",
        "mean": "{out} = {0}.mean(0, keepdim=True)",
        "logsumexp": "{out} = {0}.logsumexp(-1, keepdim=True)",
        "cumsum": "{out} = {0}.cumsum(0)",
        "cumprod": "{out} = torch.tanh({0}).cumprod(-1)",
        "softmax": "{out} = {0}.softmax(-1)",
        "log_softmax": "{out} = {0}.log_softmax(0)",
        "layer_norm": "{out} = F.layer_norm({0}, {0}.shape[-1:], eps=0.1)",
        "group_norm": "{out} = F.group_norm({0}[None], 1, eps=0.1)[0]",
        "matmul": "{out} = {0} @ {1}",
        "linear": "{out} = F.linear({0}, {1}) / 2",
        "bmm": "{out} = torch.bmm({0}[None], {1}.mT[None])[0] / 2",
        "einsum": '{out} = torch.einsum("ab,cb->ca", {0}, {1}) / 2',
        "var_mean": "{out}, {other} = torch.var_mean({0}, 0, correction=0, keepdim=True)",
        "chunk": "{out}, {other} = torch.cat([{0}, {1}], -1).sin().chunk(2, -1)",
        "split": "{out}, {other} = torch.cat([{0}, {0}.cos()]).split({0}.shape[0])",
        "unbind": "{out}, {other} = torch.stack([{0}, {0}.cos()], 1).unbind(1)",
        "sort": "{out}, {other} = {0}.sort(dim=-1, stable=True)",
        "topk": "{out}, {other} = {0}.topk(1, -1)",
        "max": "{out}, {other} = {0}.max(0, keepdim=True)",
        "flatten": "{out} = {0}.reshape(-1).sin().view({0}.shape)",
        "transposed_rows": "{out} = {0}.mT.reshape({0}.shape)",
        "expand": "{out} = {0}.sum(0, keepdim=True).expand({0}.shape)",
        "slice": "{out} = {0}[:, ::2]",
        "select": "{out} = {0}[0][None].cos()",
        "flip": "{out} = {0}.flip(1)",
        "index": "{out} = {0}[torch.arange({0}.shape[0]).flip(0)]",
        "gather": "{out} = {0}.gather(1, {0}.argsort(dim=1, stable=True))",
    },
    "in place": {
        "in_place_chain": "{out} = torch.sin({0}).mul_({1}).add_(1.0)",
        "write_row": "{out} = {0} * 1.5\n{out}[0] = {1}.sum()",
        "write_view": "{out} = {0} * 1.5\n{out}.mT[0].mul_(0.5)",
        "write_after_view": "{out} = {0} + 1.0\n{other} = {out}.mT\n{out}.tanh_()",
        "fill_masked": "{out} = torch.cos({0})\n{out}.masked_fill_({0} > 0.1, 0.5)",
    },
    "capture": {"global_number": "{out} = {0} * ALPHA", "module": "{out} = LAYER({0})"},
    # On contiguous values: for others, torch itself assigns numbers to elements differently
    # under plain autograd and torch.func.
    "draw": {
        "rand": "{out} = {0} * torch.rand({0}.shape, dtype={0}.dtype)",
        "dropout": "{out} = F.dropout({0}.contiguous(), 0.5)",
        "two_draws": "{out} = torch.rand({0}.shape, dtype={0}.dtype)\n"
        "{out} = {out} * {0} + torch.rand({0}.shape, dtype={0}.dtype) * {0}.sin()",
        "fill_draw": "{out} = {0} * torch.empty({0}.shape).bernoulli_(0.5).to({0}.dtype)",
    },
    "state": {"batch_norm": "{out} = NORM({0})"},
}
GROUPS = {
    kind: tuple(Statement(name, text, kind) for name, text in table.items())
    for kind, table in _TABLES.items()
}
