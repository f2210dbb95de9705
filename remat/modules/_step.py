"""The training step around a model's blocks, for `modules.plan(step=...)`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

from remat._errors import require_callable
from remat._plans.recording import (
    Optimizer,
    Recorder,
    Recording,
    optimizer_on,
    record,
    without_data,
)
from remat._torch.modules import called_with
from remat.modules._blocks import BlockCall, called_instead

_WHERE = "modules.plan(step=...)"


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """What a training step does beside calling a model, for `modules.plan`.

    Args:
        loss: from what the model returns to the loss, a number.
        optimizer: what its state takes and its step makes: an optimizer of the model's
            parameters, or a function from parameters to one (`torch.optim.AdamW`), either of
            which is run on tensors without data; or what the state takes, stated: a float
            as a multiple of the bytes of the parameters (2.0 for Adam), or a size such as
            `"3GiB"`, as an int in bytes.

    Example:
        >>> import torch
        >>> from remat import modules
        >>> step = modules.Step(torch.Tensor.sum, torch.optim.AdamW)
    """

    loss: Callable[[Any], Tensor]
    optimizer: Optimizer = 0

    def __post_init__(self) -> None:
        require_callable("modules.Step(loss)", self.loss)

    def recorded(
        self,
        model: nn.Module,
        blocks: Sequence[BlockCall],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        costs: str,
    ) -> Recording:
        """What one step does, with stand-ins for the blocks."""
        kinds = model.parameters(), model.buffers()
        own = [{id(each): each for each in kind} for kind in kinds]
        with without_data((*own, args, kwargs), _WHERE) as faked:
            parameters, buffers, args, kwargs = faked
            leaves = [each for each in parameters.values() if each.requires_grad]

            def run(recorder: Recorder) -> Tensor:
                def stand_in(
                    module: Any, forward: Any, /, *args: Any, **kwargs: Any
                ) -> Any:
                    return recorder.call(forward, args, kwargs, module.parameters())

                modules = {each.module for each in blocks}
                with called_instead(model, modules, stand_in):
                    found = called_with(model, parameters | buffers, args, kwargs)
                return self.loss(found)

            where = "modules.Step(optimizer=...)"
            optimizer = optimizer_on(self.optimizer, parameters, where)
            others = (buffers, args, kwargs)
            return record(run, leaves, parameters.values(), others, optimizer, costs)
