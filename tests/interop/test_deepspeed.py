"""DeepSpeed's drop-in: its variants, its outputs, and its configuration."""

import json
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import RematWarning
from remat._regions import prefetch
from remat.interop import deepspeed
from remat.interop.deepspeed import _Configuration, _Current
from remat.storage import Keep, Offload
from tests.interop.peers import gradients
from tests.support import assert_bitwise

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def test_both_of_deepspeeds_variants_are_one() -> None:
    """The gradient comes by `torch.autograd.grad` with either."""
    x = torch.randn(3, requires_grad=True)
    y = deepspeed.non_reentrant_checkpoint(lambda x: [x.sin().exp()], x)

    assert_bitwise(gradients(y, x), gradients(x.sin().exp(), x))


def test_deepspeeds_outputs() -> None:
    """One element stands for itself, a list becomes a tuple, as there."""
    x = torch.ones(3, requires_grad=True)
    sine = lambda x: x.sin().exp()  # noqa: E731

    assert isinstance(deepspeed.checkpoint(lambda x: (sine(x),), x), Tensor)
    assert type(deepspeed.checkpoint(lambda x: [sine(x), x], x)) is tuple
    assert set(deepspeed.checkpoint(lambda x: {"y": sine(x)}, x)) == {"y"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"contiguous_checkpointing": True}, "a tensor for each value"),
        ({"num_checkpoints": 4}, "there is none"),
        ({"synchronize": True}, "read nothing from the device"),
        ({"profile": True}, r"Use torch\.profiler"),
        ({"partition_activations": True}, "Without `mpu_` nothing says which ranks"),
    ],
    ids=str,
)
def test_deepspeeds_options_without_effect_say_why(options: Any, reason: str) -> None:
    """By keyword and in a configuration; what is off says nothing."""
    (name,) = options
    entries = {
        "contiguous_checkpointing": "contiguous_memory_optimization",
        "num_checkpoints": "number_checkpoints",
        "synchronize": "synchronize_checkpoint_boundary",
    }
    section = {entries.get(name, name): options[name]}
    in_config: Any = {"deepspeed_config": {"activation_checkpointing": section}}
    for told in (options, in_config):
        with pytest.warns(RematWarning, match=rf"configure\({name}=.*{reason}"):
            deepspeed.configure(None, **told)
    off: Any = dict.fromkeys(options, False)
    deepspeed.configure(**off)


def test_deepspeed_is_configured_by_keyword_mapping_and_file(tmp_path) -> None:
    """What is told by keyword goes before what a file says; each call starts anew."""
    assert not deepspeed.is_configured()
    config = {"activation_checkpointing": {"cpu_checkpointing": True}, "zero": {}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for each in (config, str(path), path):
        deepspeed.configure(deepspeed_config=each)
        assert _Current.value == _Configuration(checkpoint_in_cpu=True)
    deepspeed.configure(deepspeed_config=path, checkpoint_in_cpu=False)
    assert _Current.value == _Configuration()
    assert deepspeed.is_configured()
    mpu = types.SimpleNamespace(get_model_parallel_group=None)
    deepspeed.configure(mpu, partition_activations=True)
    deepspeed.configure(partition_activations=True)

    assert _Current.value == _Configuration(mpu, partition_activations=True)


def test_an_entry_that_deepspeed_does_not_know_is_refused() -> None:
    """A misspelled option is not left out in silence."""
    config = {"activation_checkpointing": {"cpu_checkpoint": True}}
    with pytest.raises(
        ValueError, match=r"has an entry 'cpu_checkpoint'.*cpu_checkpoi"
    ):
        deepspeed.configure(deepspeed_config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mpu_": 3, "partition_activations": True}, r"mpu_=.*\): got 3, of type int"),
        ({"deepspeed_config": 3}, r"deepspeed_config=.*\): got 3, of type int"),
        (
            {"deepspeed_config": {"activation_checkpointing": None}},
            r'deepspeed_config\["activation_checkpointing"\]: got None, of type NoneType',
        ),
    ],
    ids=["mpu_", "deepspeed_config", "section"],
)
def test_deepspeed_is_configured_by_what_it_can_use(options: Any, message: str) -> None:
    """What is of another kind raises there, not in the first checkpoint."""
    with pytest.raises(TypeError, match=message):
        deepspeed.configure(**options)
    assert not deepspeed.is_configured()


def test_deepspeeds_host_memory_is_offload() -> None:
    """Of the activations among a call's arguments."""
    told = _Configuration(checkpoint_in_cpu=True)

    assert told.storage((), {}) == Offload()
    assert _Configuration().storage((), {}) == Keep()


def test_reset_drops_what_a_failed_backward_left() -> None:
    """The configuration stays."""
    deepspeed.configure()
    prefetch._thread.flights[(0,)] = None  # type: ignore[assignment]

    deepspeed.reset()

    assert not prefetch._thread.flights
    assert deepspeed.is_configured()
