"""Recomputation in models of Hugging Face's transformers, by the models' own hook.

Each model of transformers hands its layers to a checkpointing function when it trains, and
lets that function be set: `_set_gradient_checkpointing`, which `gradient_checkpointing_enable` calls.
`enable` sets one that makes regions.

What a caller asks for by `output_attentions`, `output_router_logits` and the like, hooks inside
of the layers collect in lists. A region returns what it collected, so that it has its gradient.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import nn

from remat._api import remat
from remat._calls.options import PolicyLike
from remat._errors import SideEffectError, refuse, require_count
from remat._torch import dynamo
from remat._torch.modules import calling_module, forward_hooks_in
from remat._user_lines import warn
from remat.interop._late_product import LateHead
from remat.layers import Tiled, tiled
from remat.layers._tiled import require_tiles

try:
    import transformers as _transformers  # pyright: ignore[reportMissingTypeStubs]
    from transformers.utils import (  # pyright: ignore[reportMissingTypeStubs]
        output_capturing as _capturing,
    )
except ImportError as error:
    raise ImportError(
        "remat.interop.transformers needs transformers, which is not installed. In a clone, "
        "python -m pip install '.[transformers]'. The rest of remat.interop works without."
    ) from error

_M = TypeVar("_M", bound=nn.Module)
_HOOK = "_set_gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
# What the hooks of this thread's call fill: key -> list, and which hidden states are kept.
_active: Any = _capturing._active_collector  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
_SELECTED = "_hidden_states_layers"


def enable(
    model: _M,
    policy: PolicyLike = None,
    *,
    every: int = 1,
    tiled_loss: int | str | None = None,
    tiled_mlp: int | str | None = None,
    **options: Any,
) -> _M:
    """Makes the layers of a model of transformers recompute while it trains, in place.

    As `model.gradient_checkpointing_enable()` does it, with regions of this package in the
    place of torch's checkpoint; what that takes out of a layer (a key/value cache) is taken
    out here too. What hooks inside the layers collect (`output_router_logits`) is
    returned by the regions, with its gradient. `Trainer` needs nothing: if `gradient_checkpointing` is set in its
    arguments, regions stay, and are what it uses. Equal layers share one trace.

    Args:
        model: a `PreTrainedModel`, or a `PeftModel` around one.
        policy: which values of a layer may be saved; None means nothing.
        every: makes each `every`-th layer recompute.
        tiled_loss: in how many tiles the logits are computed for the loss, or a size (see
            `layers.tiled_cross_entropy`). The model's `logits` are computed when something
            else reads them; a model that changes them before its loss gets them whole.
        tiled_mlp: in how many tiles along the sequence the modules named `mlp` run, or a
            size (see `layers.tiled`). `modules.plan` may make either number larger.
        **options: further options of `remat`. The default of `rng` is "preserve"; a layer
            that cannot be traced (experts that are chosen in a Python loop) needs
            `engine="rerun"`, or "auto" where others can be.

    Returns:
        The model.

    Raises:
        TypeError: it is not a model of transformers, or `remat` has no such option.
        ValueError: it does not support checkpointing, or `every` is below 1; its head is no
            linear layer without bias, or no module is named `mlp`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from remat import policies
        >>> from remat.interop import transformers
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 8}
        >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
        >>> model = transformers.enable(
        ...     LlamaModel(config).train(), policies.save_attention_outputs
        ... )
        >>> model(torch.ones(1, 4, dtype=torch.int64)).last_hidden_state.sum().backward()

    References:
        `PreTrainedModel.activation_checkpointing_enable` of transformers 5.23.
    """
    owner = _owner_of(model)
    require_count("interop.transformers.enable(every=...)", every, at_least=1)
    settings: dict[str, Any] = {"rng": "preserve", "policy": policy, **options}
    run = functools.partial(_run_layer, remat(**settings))
    # All that may be refused comes first, and leaves the model as it was.
    forwards = _forwards_in_tiles(model, tiled_loss, tiled_mlp)
    setter = functools.partial(_set_checkpointing, owner, run, every)
    setter(enable=True)
    owner.__dict__[_HOOK] = setter
    _undo_tiles(model)
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    return model


_ALONG_SEQUENCE = "b (tile s) d -> b (tile s) d"


@final
class _TiledMLP:
    """Stands in the place of an MLP's `forward`: its tiles, where hooks collect nothing inside."""

    def __init__(self, mlp: nn.Module, tiled: Tiled[Any, Any]) -> None:
        self.mlp = mlp
        self.tiled = tiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The MLP's result, computed tile by tile."""
        if torch.compiler.is_dynamo_compiling():
            return self.tiled(*args, **kwargs)
        through = calling_module()
        _require_nothing_collected(self.mlp if through is None else through)
        return self.tiled.called_through(through)(*args, **kwargs)


def _require_nothing_collected(mlp: nn.Module) -> None:
    """Refuses a call whose hooks would collect something for each tile, or in a trace alone."""
    asked: Any = _active.get()
    if not asked:
        return
    found = {
        f"output_{key}" for key in map(_key_of, forward_hooks_in(mlp)) if key in asked
    }
    if found:
        names = ", ".join(sorted(found))
        raise SideEffectError.of(
            where="interop.transformers.enable(tiled_mlp=...)",
            what=f"the model is called with {names}, which hooks collect inside of a "
            f"{type(mlp).__name__}.",
            why="It runs tile by tile, and they would collect a part for each tile.",
            do=f"Call the model without {names}, or enable without `tiled_mlp`.",
        )


def _key_of(hook: Any) -> str | None:
    """What a hook collects, if it is one of transformers that collects."""
    if getattr(hook, "__module__", None) != _capturing.__name__:
        return None
    return inspect.getclosurevars(hook).nonlocals.get("key")


def _forwards_in_tiles(
    model: nn.Module, tiled_loss: int | str | None, tiled_mlp: int | str | None
) -> list[tuple[nn.Module, Any]]:
    """Modules that are to run in tiles, each with what takes the place of its forward."""
    found: list[tuple[nn.Module, Any]] = []
    if tiled_loss is not None:
        require_tiles(tiled_loss, "interop.transformers.enable(tiled_loss=...)")
        head = _head_of(model)
        found.append((head, LateHead(head, tiled_loss)))
    if tiled_mlp is not None:
        require_tiles(tiled_mlp, "interop.transformers.enable(tiled_mlp=...)")
        for mlp in _mlps_of(model):
            instead = tiled(_whole_forward(mlp), _ALONG_SEQUENCE, tiles=tiled_mlp)
            found.append((mlp, _TiledMLP(mlp, instead)))
    return found


def _is_in_tiles(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), (LateHead, _TiledMLP))


def _whole_forward(module: nn.Module) -> Any:
    """A module's forward, without the tiles that it may have already."""
    is_own = not _is_in_tiles(module)
    return module.forward if is_own else type(module).forward.__get__(module)


def _undo_tiles(model: nn.Module) -> None:
    for module in filter(_is_in_tiles, model.modules()):
        del module.__dict__["forward"]


def _head_of(model: nn.Module) -> nn.Linear:
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    is_linear = isinstance(head, nn.Linear) and head.bias is None  # pyright: ignore[reportUnnecessaryComparison]
    if (
        is_linear
        and getattr(_whole_forward(head), "__func__", None) is nn.Linear.forward
    ):
        return head
    raise refuse(
        "interop.transformers.enable(tiled_loss=...)",
        type(model).__name__,
        why="Its logits are not the product with one weight.",
        do="Pass a model whose head is a linear layer without bias, or leave it out.",
    )


def _mlps_of(model: nn.Module) -> list[nn.Module]:
    named = [getattr(each, "mlp", None) for each in model.modules()]
    if found := [each for each in named if isinstance(each, nn.Module)]:
        return found
    raise refuse(
        "interop.transformers.enable(tiled_mlp=...)",
        type(model).__name__,
        why="None of its modules is named `mlp`.",
        do="Leave it out; layers.tiled takes any function.",
    )


def disable(model: _M) -> _M:
    """Undoes `enable`, in place.

    Args:
        model: the model.

    Returns:
        The model, whose layers do not recompute.

    Raises:
        TypeError: it is not a model of transformers.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from remat.interop import transformers
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 8}
        >>> config = BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
        >>> model = transformers.enable(BertModel(config))
        >>> transformers.disable(model).is_activation_checkpointing
        False
    """
    owner = _owner_of(model)
    owner.__dict__.pop(_HOOK, None)
    getattr(owner, _HOOK)(enable=False)
    for module in owner.modules():
        module.__dict__.pop(_FUNCTION, None)
    _undo_tiles(model)
    return model


@dynamo.unseen_by_dynamo
def _run_layer(
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a layer of transformers calls: itself, as a region."""
    collected: dict[str, Any] | None = _active.get()
    if not collected:
        return decorate(function)(*args, **kwargs)
    keys = [key for key in collected if key != _SELECTED]
    asked = tuple((key, _num_hidden_states(collected, key)) for key in keys)
    chosen = tuple(sorted(collected[_SELECTED])) if _SELECTED in collected else None
    region = decorate(functools.partial(_run_collecting, function, asked, chosen))
    result, gathered = region(*args, **kwargs)
    for key, each in zip(keys, gathered, strict=True):
        collected[key].extend(each)
    return result


def _run_collecting(
    function: Callable[..., Any],
    asked: tuple[tuple[str, int], ...],
    chosen: tuple[int, ...] | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, list[list[Any]]]:
    """What a layer returns, and what its hooks have collected for each key meanwhile."""
    collected: dict[str, Any] = {key: [None] * place for key, place in asked}
    if chosen is not None:
        collected[_SELECTED] = chosen
    token = _active.set(collected)
    try:
        result = function(*args, **kwargs)
    finally:
        _active.reset(token)
    return result, [collected[key][place:] for key, place in asked]


def _num_hidden_states(collected: dict[str, Any], key: str) -> int:
    """How many a hook must find, to know the first layer, whose input is a hidden state.

    No more than it asks for, so that equal layers share a trace.
    """
    if key != "hidden_states":
        return 0
    count = len(collected[key])
    return count if _SELECTED in collected else min(count, 1)


def _set_checkpointing(
    owner: nn.Module,
    function: Callable[..., Any],
    every: int,
    enable: bool = True,
    gradient_checkpointing_func: Callable[..., Any] | None = None,
    every_n_layers: int = 1,
) -> None:
    """Stands before the model's own hook: sets our function, whatever is passed."""
    # What of another's wish is not followed; either variant of torch's is ours.
    wishes: dict[str, Any] = dict(getattr(gradient_checkpointing_func, "keywords", {}))
    wishes.pop("use_reentrant", None)
    if every_n_layers != 1:
        wishes["every_n_layers"] = every_n_layers
    if enable and wishes:
        warn(
            where="the model's activation_checkpointing_enable",
            what=f"asks for {wishes}, which has no effect.",
            why="interop.transformers.enable has already set the options of its "
            "layers.",
            do="Pass the options to enable, or call interop.transformers.disable first.",
        )
    hook = getattr(type(owner), _HOOK)
    layers = {} if every == 1 else {"every_n_layers": every}
    hook(owner, enable=enable, gradient_checkpointing_func=function, **layers)


def _owner_of(model: nn.Module) -> nn.Module:
    """The model of transformers, below what peft puts around it."""
    inner: Any = model
    while not isinstance(inner, _transformers.PreTrainedModel):
        below = getattr(inner, "base_model", None) or getattr(inner, "model", None)
        if not isinstance(below, nn.Module):
            raise TypeError(
                "interop.transformers takes a model of transformers, or one that peft "
                f"has wrapped, not a {type(model).__name__}. For other modules there "
                "is remat.modules.apply."
            )
        inner = below
    if not inner.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(inner).__name__} does not support checkpointing of its layers. Name "
            "its layers instead: remat.modules.apply(model, ...)."
        )
    return inner
