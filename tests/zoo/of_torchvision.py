"""Models of torchvision, on few pixels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import checkpoint_by_torch, make_regions
from tests.zoo.members import Member, imported

BATCH, PIXELS = 2, 64

_WINDOWS = {
    "depths": [2, 2],
    "num_heads": [2, 2],
    "patch_size": [4, 4],
    "window_size": [4, 4],
}
_STAGES = {"block_config": (2, 2, 2, 2), "growth_rate": 4, "num_init_features": 8}

#: Each by what it is made with; "blocks" names the modules that recompute, where they are no list.
MODELS: dict[str, dict[str, Any]] = {
    "DenseNet": {**_STAGES, "drop_rate": 0.1},
    "MaxVit": {"input_size": (PIXELS, PIXELS), "stem_channels": 8, "block_channels": [8, 16], "block_layers": [1, 1],
               "head_dim": 4, "partition_size": 4, "stochastic_depth_prob": 0.1},
    "SwinTransformer": {**_WINDOWS, "embed_dim": 16, "dropout": 0.1},
    "VisionTransformer": {"image_size": PIXELS, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32,
                          "mlp_dim": 64, "dropout": 0.1, "attention_dropout": 0.1},
    "convnext_tiny": {},
    "efficientnet_b0": {},
    "googlenet": {"init_weights": False, "aux_logits": False, "blocks": "inception*"},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
}  # fmt: skip


def members() -> list[Member]:
    """One for each name."""
    return [
        Member(
            f"torchvision/{name}",
            build=partial(build, name),
            batch=batch,
            recompute=partial(make_regions, where=sizes.get("blocks")),
            recompute_by_torch=partial(checkpoint_by_torch, where=sizes.get("blocks")),
        )
        for name, sizes in MODELS.items()
    ]


def build(name: str) -> nn.Module:
    """A model with random weights and ten classes."""
    sizes = {key: size for key, size in MODELS[name].items() if key != "blocks"}
    make = getattr(imported("torchvision.models"), name)
    return make(num_classes=10, **sizes).train()


def batch(model: nn.Module) -> dict[str, Tensor]:
    """A few images."""
    return {"x": torch.randn(BATCH, 3, PIXELS, PIXELS)}
