"""Cross-entropy over a large vocabulary, whose logits never exist at once."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, final

import torch
from torch import Tensor

from remat._api import remat
from remat._errors import refusal, refuse, require_choice, require_number, require_type
from remat._switches.blocks import is_inert
from remat._torch import autocast, autograd, fakes, guards, levels
from remat._tracing.thread import is_running
from remat.layers._independence import known_independent
from remat.layers._tiled import tiled


def tiled_cross_entropy(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    tiles: int | str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """The cross-entropy of `x @ head.T`, tile by tile along the tokens.

    It is `F.cross_entropy(logits, targets)` with, for each token, `z_loss * logsumexp ** 2`
    added, and `softcap * tanh(logits / softcap)` for the logits.

    Laws: loss and gradients are those of the formula, up to the order of sums, under every
    transform. The logits of one tile exist at a time. Outside of transforms, gradients are
    computed with the loss, so that no matrix product runs twice: what waits for the backward is
    they, as large as `x` and `head`. Half precision is computed in float32, but for the
    products. In float16 the backward recomputes the logits, since gradients that were not scaled
    would vanish.

    Args:
        x: (..., d), one row a token.
        head: (vocabulary, d), as in `nn.Linear`; (d, vocabulary) will do where the sizes tell.
        targets: (...), integers; those equal to `ignore_index` count for nothing.
        tiles: how many, or bytes that the values of one tile may take (see `tiled`).
        ignore_index: the target of tokens that are left out.
        label_smoothing: the part of the target that all classes share, in [0, 1].
        softcap: the limit of the logits, as in Gemma; None for none.
        z_loss: the weight of the squared logarithm of the partition function, as in PaLM.
        reduction: "mean" over the tokens that count, "sum", or "none" for a loss a token, zero
            for those that do not count.

    Returns:
        The loss, a scalar, or of the shape of `targets`, in float32 for half precision.

    Raises:
        TypeError: `x`, `head` or `targets` is no tensor, or targets are no integers.
        ValueError: shapes do not fit, or an option is out of range.

    Example:
        >>> import torch
        >>> from remat.layers import tiled_cross_entropy
        >>> x, head = torch.zeros(2, 6, 4), torch.ones(10, 4, requires_grad=True)
        >>> targets = torch.arange(12).view(2, 6) % 10
        >>> tiled_cross_entropy(x, head, targets, tiles=3)
        tensor(2.3026, grad_fn=<...>)

    References:
        Liger Kernel's fused linear cross-entropy (https://arxiv.org/abs/2410.10989); Wijmans et
        al., "Cut your losses", 2024, https://arxiv.org/abs/2411.09009; z-loss: Chowdhery et
        al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, section 5.
    """
    options = _LossOptions(ignore_index, label_smoothing, softcap, z_loss)
    _require_options(options, reduction)
    _require_tensors(x, head, targets)
    head = autocast.in_products(_laid_as_linear(x, head, targets))
    x = autocast.in_products(x)
    rows, labels = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    if reduction == "none":
        losses = tiled(_LOSSES, "(tile n) d, (tile n), ... -> (tile n)", tiles=tiles)
        return losses(rows, labels, head, *options).view(targets.shape)
    weight = torch.ones((), dtype=_widen(x).dtype, device=x.device)
    if reduction == "mean":
        weight = weight / (labels != ignore_index).sum()
    total = tiled(_TOTAL, "(tile n) d, (tile n), ... -> ", tiles=tiles)
    if not _is_first_order((x, head)):
        # Not a number where no target is used, as torch's mean.
        return total(rows, labels, head, weight, *options) + 0 * weight
    size = total.length_of_tile(rows, labels, head, weight, *options)
    given = total, size, options, rows, labels, head, weight
    return cast("Tensor", _LossWithGradients.apply(*given))


class _LossOptions(NamedTuple):
    ignore_index: int
    smoothing: float
    softcap: float | None
    z_loss: float


def _losses(rows: Tensor, labels: Tensor, head: Tensor, *options: Any) -> Tensor:
    ignore_index, smoothing, softcap, z_loss = _LossOptions(*options)
    logits = _widen(rows @ head.T)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    is_used = labels != ignore_index
    index = torch.where(is_used, labels, 0).unsqueeze(-1)
    partition = logits.logsumexp(-1)
    losses = partition - (1 - smoothing) * logits.gather(-1, index).squeeze(-1)
    if smoothing:
        losses = losses - smoothing * logits.mean(-1)
    if z_loss:
        losses = losses + z_loss * partition.square()
    return torch.where(is_used, losses, 0)


def _total(
    rows: Tensor, labels: Tensor, head: Tensor, weight: Tensor, *options: Any
) -> Tensor:
    return (_losses(rows, labels, head, *options) * weight).sum()


_LOSSES = known_independent(remat(_losses, dynamic_shapes=True))
_TOTAL = known_independent(remat(_total, dynamic_shapes=True))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _is_first_order(tensors: Sequence[Tensor]) -> bool:
    """Whether plain autograd alone differentiates a call, and wants a gradient of it."""
    if torch.compiler.is_compiling() or is_inert() or is_running():
        return False
    is_mapped = levels.interpreter_is_active() or levels.dual_level_is_active()
    wants = any(each.requires_grad for each in tensors)
    # The gradients of a mean are too small for float16, before a loss scale is known.
    is_small = any(each.dtype is torch.float16 for each in tensors)
    # Tensors without data are as plain: a step's peak is counted on them.
    rest = [each for each in tensors if not fakes.is_fake(each)]
    return wants and not is_mapped and not is_small and guards.are_plain(rest)


@final
class _LossWithGradients(torch.autograd.Function):
    """The total loss, whose gradients are computed along with it."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes the tiled total, the size of a tile, options, rows, labels, head, weight."""
        total, size, options, rows, labels, head, weight = given
        _, _, _, for_rows, _, for_head, _ = ctx.needs_input_grad
        d_rows = torch.empty_like(rows) if for_rows else None
        # Many terms are added up, for which half precision is too coarse.
        d_head = torch.zeros_like(head, dtype=_widen(head).dtype) if for_head else None
        loss = 0 * weight  # as above: not a number where no target is used
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            own = None if d_rows is None else d_rows[part]
            tile = rows[part], labels[part], head, weight, options
            loss += _tile_loss(tile, own, d_head)
        d_head = None if d_head is None else d_head.to(head.dtype)
        ctx.save_for_backward(rows, labels, head, weight, d_rows, d_head)
        ctx.total, ctx.options = total, options
        return loss

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, labels, head, weight, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():
            # They will be differentiated: the tiles run again, as regions. The rows may
            # depend on the head, whose gradient is to come from the product alone.
            rows, head = rows.view_as(rows), head.view_as(head)
            again = ctx.total(rows, labels, head, weight, *ctx.options)
            wanted = [
                each
                for each, found in zip((rows, head), gradients, strict=True)
                if found is not None
            ]
            found = iter(
                torch.autograd.grad(again, wanted, cotangent, create_graph=True)
            )
            gradients = [None if each is None else next(found) for each in gradients]
        else:
            # What no other backward will read takes the result.
            is_last = not autograd.keeps_graph()
            is_last = is_last and not autograd.is_batched_by_autograd(cotangent)
            ctx.maybe_clear_saved_tensors()
            scale = Tensor.mul_ if is_last else Tensor.mul
            gradients = [
                each if each is None else scale(each, cotangent) for each in gradients
            ]
        d_rows, d_head = gradients
        return None, None, None, d_rows, None, d_head, None


def _tile_loss(
    tile: tuple[Tensor, Tensor, Tensor, Tensor, _LossOptions],
    d_rows: Tensor | None,
    d_head: Tensor | None,
) -> Tensor:
    """A tile's part of the loss; writes the gradient of its rows, adds to that of the head.

    The logits become their own gradient, in place.
    """
    rows, labels, head, weight, options = tile
    ignore_index, smoothing, softcap, z_loss = options
    logits = _widen(rows @ head.T)
    slope = None
    if softcap is not None:
        capped = logits.div_(softcap).tanh_()
        slope = 1 - capped.square()
        capped.mul_(softcap)
    is_used = (labels != ignore_index).unsqueeze(-1)
    index = torch.where(is_used, labels.unsqueeze(-1), 0)
    weight = torch.where(is_used, weight, 0)
    constant = (1 - smoothing) * logits.gather(-1, index)
    if smoothing:
        constant += smoothing * logits.mean(-1, keepdim=True)
    top = logits.amax(-1, keepdim=True)
    sums = logits.sub_(top).exp_().sum(-1, keepdim=True)
    partition = top + sums.log()
    loss = ((partition - constant + z_loss * partition.square()) * weight).sum()

    logits.mul_((1 + 2 * z_loss * partition) * weight / sums)
    if smoothing:
        logits.sub_(weight * (smoothing / logits.shape[-1]))
    logits.scatter_add_(-1, index, (smoothing - 1) * weight)
    if slope is not None:
        logits.mul_(slope)
    products = logits.to(head.dtype)
    if d_rows is not None:
        torch.mm(products, head, out=d_rows)
    if d_head is not None and d_head.dtype == products.dtype:
        d_head.addmm_(products.T, rows)
    elif d_head is not None:
        d_head += products.T @ rows
    return loss


_NUMBERS = ("label_smoothing", "softcap", "z_loss")


def _require_options(options: _LossOptions, reduction: object) -> None:
    where = "tiled_cross_entropy({}=...)"
    require_type(
        where.format("ignore_index"), options.ignore_index, int, wanted="an int"
    )
    for name, given in zip(_NUMBERS, options[1:], strict=True):
        if name == "softcap" and given is None:
            continue
        require_number(where.format(name), given)
        if not (isinstance(given, Tensor) or math.isfinite(cast("float", given))):
            why = "The loss would be no number."
            raise refuse(where.format(name), given, why=why, do="Pass a finite one.")
    if not 0 <= options.smoothing <= 1:
        raise refuse(
            where.format("label_smoothing"),
            options.smoothing,
            why="It is the part of the target that all classes share.",
            do="Pass a number in [0, 1].",
        )
    if options.softcap is not None and not options.softcap > 0:
        raise refuse(
            where.format("softcap"),
            options.softcap,
            why="It is the limit of the logits' size.",
            do="Pass a positive number, or None.",
        )
    reductions = ("mean", "sum", "none")
    require_choice("reduction", reduction, reductions, of="tiled_cross_entropy")


def _require_tensors(x: object, head: object, targets: object) -> None:
    where = "tiled_cross_entropy({}=...)"
    for name, given in (("x", x), ("head", head), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise refusal(
                TypeError,
                where=where.format(name),
                what=f"got a {type(given).__name__}.",
                why="It computes with tensors alone.",
                do="Pass a tensor; for the head, the weight of a linear layer without bias.",
            )
    dtype = cast("Tensor", targets).dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise refusal(
            TypeError,
            where=where.format("targets"),
            what=f"got {dtype}.",
            why="Each target is the number of a class; probabilities of classes are not taken.",
            do="Pass integers: targets.long(), if they are whole numbers.",
        )


def _laid_as_linear(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The head as (vocabulary, d); refuses shapes that do not fit."""
    width = x.shape[-1] if x.dim() else 0
    if (
        x.dim()
        and x.shape[:-1] == targets.shape
        and head.dim() == 2
        and width in head.shape
    ):
        return head if head.shape[1] == width else head.T
    raise refusal(
        ValueError,
        where="tiled_cross_entropy",
        what=f"got x of the shape {[*x.shape]}, head of {[*head.shape]}, targets of "
        f"{[*targets.shape]}.",
        why="They are (..., d), (vocabulary, d) and (...).",
        do="Pass a row for each target, and the weight of the last linear layer.",
    )
