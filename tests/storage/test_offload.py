"""Offloading: to a file that nobody can see, and to where it has no effect."""

import os
import resource
import warnings
from typing import Any

import pytest
import torch

from remat import RematWarning, checkpoint_name, policies, remat, storage
from remat.storage import Offload, _transfer

pytestmark = pytest.mark.contract


def test_a_file_has_no_name(tmp_path) -> None:
    """Its memory is mapped, and ends with the tensor, whatever happens to the process."""
    value = torch.randn(1000)
    stored = Offload(path=str(tmp_path)).store(value)

    assert list(tmp_path.iterdir()) == []
    assert torch.equal(stored.restore(), value)
    (waiting,) = stored.tensors
    assert waiting.data_ptr() != value.data_ptr()


def test_the_default_device_does_not_matter(tmp_path) -> None:
    """Files and host memory are the host's."""
    value = torch.randn(10)
    with torch.device("meta"):
        stored = Offload(path=str(tmp_path)).store(value)
        memory = _transfer._memory_for_transfer(8, pin=False)

    assert torch.equal(stored.restore(), value)
    assert memory.device.type == "cpu"


def test_a_missing_folder_is_an_error(tmp_path) -> None:
    """It is not made, and the error names it, and says what to do."""
    folder = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError) as error:
        Offload(path=folder).store(torch.ones(3))

    assert str(error.value) == (
        f"[Errno 2] Offload(path={folder!r}): cannot make a file for a value float32[3] of "
        "12 bytes. The system reports: No such file or directory. Pass a folder that exists "
        "and can be written, on a disk with room for all values that wait at one time."
    )


def test_a_full_disk_is_an_error(tmp_path) -> None:
    """Not the end of the process; no file is left, and the next call is right."""
    policy = policies.everything_saveable.stored(Offload(path=str(tmp_path)))
    region = remat(lambda x: (x.sin().cos() * x).sum(), policy=policy)
    x = torch.randn(10_000, requires_grad=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot make a file .* 40000 bytes"):
            region(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list(tmp_path.iterdir()) == []
    (found,) = torch.autograd.grad(region(x), x)
    (plain,) = torch.autograd.grad((x.sin().cos() * x).sum(), x)
    assert torch.equal(found, plain)


def test_the_room_of_a_file_is_taken(tmp_path, monkeypatch) -> None:
    """Else a disk that is full ends the process when the mapped memory is written."""
    taken: list[int] = []
    monkeypatch.setattr(
        os, "posix_fallocate", lambda _, start, size: taken.append(size)
    )
    Offload(path=str(tmp_path)).store(torch.ones(3))

    assert taken == [12]


@pytest.mark.parametrize(
    ("options", "is_stored"),
    [
        ({}, True),
        ({"min_bytes": 400}, True),
        ({"min_bytes": 401}, False),
        ({"max_bytes": 400}, True),
        ({"max_bytes": 399}, False),
    ],
    ids=str,
)
def test_sizes(tmp_path, options: Any, is_stored: bool) -> None:
    """Values of other sizes stay where they are."""
    value = torch.ones(100)
    (waiting,) = Offload(path=str(tmp_path), **options).store(value).tensors

    assert (waiting is not value) is is_stored


def test_a_device_where_the_value_is_already_warns() -> None:
    """On a machine without another device `Offload()` does nothing, and says so."""
    policy = policies.everything_saveable.stored(Offload())
    region = remat(lambda x: x.sin().sin().sum(), policy=policy)
    with pytest.warns(RematWarning, match='has no effect on a value that is on "cpu"'):
        region(torch.ones(3, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region(torch.ones(3, requires_grad=True)).backward()  # said once


def test_files_say_nothing(tmp_path) -> None:
    """A storage with an effect does not warn."""
    policy = policies.everything_saveable.stored(Offload(path=str(tmp_path)))
    region = remat(lambda x: x.sin().sin().sum(), policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region(torch.ones(3, requires_grad=True)).backward()


def test_another_device_is_copied_to() -> None:
    """The value is on `device` while it waits."""
    stored = Offload("meta").store(torch.ones(3))

    assert stored.tensors[0].device.type == "meta"


def test_jaxs_policies_offload() -> None:
    """`save_and_offload_only_these_names` stores what it names in host memory."""
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_name(x.sin(), "h").sin().sum()

    region = remat(f, policy=policy)
    found = region.saved_residuals(torch.ones(3, requires_grad=True))

    assert [each.storage for each in found if each.name == "h"] == [storage.Offload()]


def test_what_is_offloaded_is_not_recomputed(tmp_path) -> None:
    """Torch's selective checkpointing has such a policy, and recomputes."""
    far = Offload(path=str(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_name(x.exp(), "h").sin().sum()

    x = torch.ones(3, requires_grad=True)
    for policy, count in (
        (None, 1),
        (policies.save_only_these_names("h").stored(far), 0),
    ):
        _, backward = remat(f, policy=policy).programs(x)
        assert str(backward).count("aten_exp(") == count
