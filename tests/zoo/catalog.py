"""Every member of the zoo. Nothing is imported from a library before a model is built."""

from tests.zoo import of_diffusers, of_timm, of_torchvision, of_transformers
from tests.zoo.members import Member


def members() -> list[Member]:
    """All of them, library by library."""
    return [
        *of_transformers.members(),
        *of_timm.members(),
        *of_diffusers.members(),
        *of_torchvision.members(),
    ]
