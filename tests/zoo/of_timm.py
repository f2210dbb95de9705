"""Models of timm: the smallest of many families, on few pixels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import checkpoint_by_torch, make_regions
from tests.zoo.members import Member, imported

BATCH, PIXELS = 2, 64

_SIZE = {"img_size": PIXELS}
_PATHS = {"drop_path_rate": 0.1}  # whole layers are left out at random
_TWO_LAYERS = {"depth": 2, "embed_dim": 32, "num_heads": 2, **_SIZE, **_PATHS}
_TWO_STAGES = {"depths": (1, 2), "embed_dim": 16, "num_heads": (1, 2), **_PATHS}

#: Models that take the same arguments.
ALIKE: list[tuple[dict[str, Any], str]] = [
    (
        {**_SIZE, **_PATHS},
        """
        botnet26t_256 coat_lite_tiny coatnet_nano_rw_224 convit_tiny efficientformerv2_s0
        gcvit_xxtiny gmlp_ti16_224 levit_128s mobileone_s0 mobilevit_xxs mobilevitv2_050
        pit_ti_224 resmlp_12_224 swiftformer_xs test_byobnet test_vit test_vit_relpos
        visformer_tiny xcit_nano_12_p8_224
        """,
    ),
    (
        _PATHS,
        """
        cpubone_nano cs3darknet_focus_s csatv2 cspnext_tiny edgenext_xx_small efficientvim_m1
        ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 hardcorenas_a hgnetv2_b0 iformer_t
        inception_next_atto lcnet_050 lowformer_b0 mobilenetv3_small_050 mobilenetv4_conv_small
        pvt_v2_b0 regnetx_002 resnest14d resnetv2_18 rexnet_100 skresnet18 starnet_s050
        test_convnext test_efficientnet test_mambaout test_nfnet test_resnet tiny_vit_5m_224
        """,
    ),
    (
        {},
        """
        densenet121 dla46_c dpn48b efficientvit_b0 ghostnet_050 hrnet_w18_small lcnetv2_small
        legacy_seresnet18 repghostnet_050 shvit_s1
        """,
    ),
    (_SIZE, "efficientvit_m0 repvit_m0_9"),
    (
        _TWO_LAYERS,
        """
        beit_base_patch16_224 cait_xxs24_224 deit_tiny_patch16_224 eva02_tiny_patch14_224
        deit3_small_patch16_224
        """,
    ),
    ({**_TWO_STAGES, **_SIZE}, "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256"),
]

#: Layers that stand in no list.
BLOCKS = {
    "densenet121": "features.denseblock*",
    "dla46_c": "level?",
    "regnetx_002": "s?",
}


def members() -> list[Member]:
    """One for each name."""
    return [
        Member(
            f"timm/{name}",
            build=partial(build, name, arguments),
            batch=batch,
            recompute=partial(make_regions, where=BLOCKS.get(name)),
            recompute_by_torch=partial(checkpoint_by_torch, where=BLOCKS.get(name)),
        )
        for arguments, names in ALIKE
        for name in names.split()
    ]


def build(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A model with random weights, ten classes and dropout."""
    timm = imported("timm")
    options = {"num_classes": 10, "drop_rate": 0.1, **arguments}
    return timm.create_model(name, pretrained=False, **options).train()


def batch(model: nn.Module) -> dict[str, Tensor]:
    """A few images."""
    return {"x": torch.randn(BATCH, 3, PIXELS, PIXELS)}
