"""A GPT in functional style: `functional_call`, keys for dropout, and a budget in bytes.

The model is a module, but training is a pure function of its parameters, a batch and a
random key. Each block is a region, around `functional_call` [1]; what it drops is drawn from
a key, and so drawn again in the backward, by 16 bytes. `policies.budget` saves, of what a
block computes, the values that spare the most recomputation for so many bytes, where a
person would choose by kind [2].

Prints, for no regions, for regions that save nothing and for two budgets a block, the peak of
a step, its FLOPs and the last loss. Losses are equal to the bit. The text that the model
learns is Python's own help.

[1] https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html
[2] V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
    https://arxiv.org/abs/2205.05198
"""

import argparse
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from remat import policies, random, remat
from remat.reporting import LiveBytes

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, RATE = 6, 64, 4, 64, 8, 0.1
TEXT = "".join(topics[name] for name in sorted(topics)).encode()
WINDOWS = torch.tensor(bytearray(TEXT)).unfold(0, CONTEXT + 1, 1)

Params = Mapping[str, Tensor]
Apply = Callable[[nn.Module, Params, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One layer, (batch, time, width) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        """What the next layer gets; `key` says what is dropped."""
        key1, key2 = random.split(key)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(attended.transpose(1, 2).flatten(2))
        x = x + random.dropout(key1, mixed, RATE)
        return x + random.dropout(key2, self.down(F.gelu(self.up(self.norm2(x)))), RATE)


class GPT(nn.Module):
    """Embeddings, blocks that `apply` calls, and logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, key: Tensor, apply: Apply) -> Tensor:
        """(batch, time) -> (batch, time, 256)."""
        x = self.token(tokens) + self.place.weight
        for number, block in enumerate(self.blocks):
            own = dict(block.named_parameters())
            x = apply(block, own, x, random.fold_in(key, number))
        return self.head(x)


def call(block: nn.Module, params: Params, x: Tensor, key: Tensor) -> Tensor:
    """One block as a pure function."""
    return functional_call(block, dict(params), (x, key))


def make_loss(model: GPT, apply: Apply) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """The loss of the next byte as a function of parameters, batch and key."""

    def loss(params: Params, batch: Tensor, key: Tensor) -> Tensor:
        logits = functional_call(model, dict(params), (batch[:, :-1], key, apply))
        return F.cross_entropy(logits.mT, batch[:, 1:])

    return loss


def draw(number: int) -> tuple[Tensor, Tensor]:
    """A batch of random windows of the text, (batch, time + 1), and a key for its step."""
    batch_key, key = random.split(random.key(number))
    starts = random.randint(batch_key, (BATCH,), maxval=len(WINDOWS))
    return WINDOWS[starts].long(), key


def train(apply: Apply, num_steps: int) -> tuple[list[float], int, int]:
    """The losses, and the peak of a step in bytes, and its FLOPs."""
    torch.manual_seed(0)
    model = GPT()
    step = grad_and_value(make_loss(model, apply))
    params = {name: each.detach() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    losses: list[float] = []
    for number in range(num_steps):
        slopes, loss = step(params, *draw(number))
        for name, each in params.items():
            each.grad = slopes[name]
        optimizer.step()
        losses.append(loss.item())
    with FlopCounterMode(display=False) as flops, LiveBytes() as live:
        step(params, *draw(0))
    return losses, live.peak_bytes, flops.get_total_flops()


def main() -> None:
    """Trains in each way, from the same parameters, on the same batches."""
    parser = argparse.ArgumentParser(description="A GPT by functional_call.")
    parser.add_argument("--steps", type=int, default=10)
    num_steps = parser.parse_args().steps

    ways = {
        "no regions": call,
        "nothing saved": remat(call),
        "1 MiB a block": remat(call, policy=policies.budget("1 MiB")),
        "2 MiB a block": remat(call, policy=policies.budget("2 MiB")),
    }
    found: list[list[float]] = []
    peaks: list[int] = []
    print("                    peak   MFLOP  last loss")
    for name, apply in ways.items():
        losses, peak, flops = train(apply, num_steps)
        found.append(losses)
        peaks.append(peak)
        row = f"{peak / 2**20:6.2f} MiB  {flops / 1e6:6.1f}  {losses[-1]:.10f}"
        print(f"{name:13}  {row}")

    plain, nothing, small, large = peaks
    assert all(losses == found[0] for losses in found)  # to the last bit
    assert nothing < small < large < 0.8 * plain


if __name__ == "__main__":
    main()
