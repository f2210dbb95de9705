"""Collectives, process groups, `fully_shard`, and the policies of torch's own wrappers.

Obsolete when torch types them, and tells the state of a module of `fully_shard`.
"""

# pyright: reportPrivateUsage=false
import contextlib
import functools
import importlib
import warnings
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from remat._torch.attributes import attributes_as

_dist: Any = dist


@functools.cache
def collective_operators() -> dict[str, Any]:
    """The operators that functions of `torch.distributed` run on tensors, by name.

    Obsolete when their schemas declare what they write, and waiting is an operator.
    """
    if not dist.is_available():
        return {}
    packets = (
        "allreduce_ allreduce_coalesced_ broadcast_ reduce_ allgather_ _allgather_base_ "
        "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_ "
        "_reduce_scatter_base_ reduce_scatter_tensor_coalesced_ gather_ scatter_ alltoall_ "
        "alltoall_base_ send recv_ recv_any_source_"
    )
    c10d: Any = torch.ops.c10d
    names = [name for name in packets.split(" ") if hasattr(c10d, name)]
    return {name: getattr(c10d, name).default for name in names}


def group_of(boxed: Any) -> Any:
    return _dist.ProcessGroup.unbox(boxed)


def reduction(boxed: Any) -> str:
    """What functional collectives call a reduction."""
    return _dist.ReduceOp.RedOpType(boxed.op()).name.lower()


def finished_work() -> Any:
    """Work that needs no waiting for, as an operator returns it."""
    return importlib.import_module("torch._C._distributed_c10d").FakeWork().boxed()


def start_gather(out: Tensor, part: Tensor, group: Any) -> Any:
    """Begins to gather the parts of all ranks into `out`; the result has `wait`.

    torch 2.13 warns that this function is deprecated; 2.15 does not. Obsolete when 2.13 is no
    longer supported.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*gather.*")
        return _dist.all_gather_into_tensor(out, part, group=group, async_op=True)


def gather_records(record: Tensor, group: Any) -> list[Tensor]:
    """The records of all ranks, of one shape and dtype."""
    found = [torch.empty_like(record) for _ in range(_dist.get_world_size(group))]
    _dist.all_gather(found, record, group=group)
    return found


def ranks_of(group: Any) -> list[int]:
    return _dist.get_process_group_ranks(group)


def picked_by(policy: Any, model: Any) -> dict[Any, dict[str, Any]]:
    """The modules, and options for each, that a policy of FSDP's picks out of a model.

    The model itself is not among them where the policy is asked about one module after the
    other. Obsolete when torch has a public way to ask a policy.
    """
    if not callable(policy):
        return policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    chosen: dict[Any, dict[str, Any]] = {}

    def pick(module: Any) -> Any:
        chosen[module] = {}
        return module

    wrap: Any = importlib.import_module("torch.distributed.fsdp.wrap")
    wrap._recursive_wrap(model, policy, pick, set(), set(), only_wrap_children=True)
    return chosen


def is_fsdp_idle(module: Any) -> bool:
    """Whether a module of `fully_shard` is in no forward or backward."""
    return module._get_fsdp_state()._training_state.name == "IDLE"


def sharded_parameters(module: Any) -> list[Tensor]:
    """The tensors that a module holds for the parameters that `fully_shard` splits.

    Parameters of inner modules that are sharded separately, and `ignored_params`, are left
    out. Obsolete when torch lists these parameters.
    """
    groups: Any = module._get_fsdp_state()._fsdp_param_groups
    places = [each._module_info for group in groups for each in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]


@contextlib.contextmanager
def called_again(module: Any) -> Generator[None]:
    """Has torch take a call of a `fully_shard` module in a backward for a forward of its own.

    After the module's first backward, and until autograd ends, torch takes each call for the
    recomputation of a forward that has its hooks already. And a forward would gather the
    parameters of the modules after it, which the backward needs no more. Obsolete when torch
    can be told what a call is for.
    """
    state: Any = module._get_fsdp_state()
    if state._training_state.name == "PRE_BACKWARD":
        state._training_state = state._training_state.__class__.IDLE
    with attributes_as(state, _states_to_forward_prefetch=[]):
        yield
