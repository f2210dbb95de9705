"""What does not run on the stand-in for an accelerator, and why: all of it, in one place."""

#: A reason, and the tests that it goes for: beginnings of their names, as pytest prints them.
LEFT_OUT: dict[str, list[str]] = {
    "it starts processes of its own, which have no such device": [
        "tests/storage/test_shard.py",
    ],
    "it states what happens where a value is on the CPU already": [
        "tests/storage/test_offload.py::test_a_device_where_the_value_is_already_warns",
        "tests/storage/test_conformance.py::"
        "test_a_value_that_its_storage_leaves_alone_is_saved_as_itself",
        "tests/storage/test_held.py::test_what_waits_elsewhere_is_told_apart",
    ],
    "it counts the workspace of draws on a CPU; an accelerator's tiles are larger": [
        "tests/random/test_memory.py",
    ],
}


def reason(name: str) -> str | None:
    """Why a test does not run, None if it does."""
    for why, names in LEFT_OUT.items():
        if name.startswith(tuple(names)):
            return f"not on the stand-in: {why}"
    return None
