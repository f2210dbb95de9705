"""Models of diffusers, made small."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.blocks import checkpoint_by_torch, make_regions
from tests.zoo.members import Member, imported

BATCH = 2


class Small(NamedTuple):
    """How a model is made small, what it reads, and which modules are its layers.

    Attributes:
        sizes: the arguments that it is made with.
        inputs: shapes of the random numbers that it reads, by argument.
        blocks: a glob for its layers, where they are not its longest list.
    """

    sizes: Mapping[str, Any]
    inputs: Mapping[str, tuple[int, ...]]
    blocks: str | None = None


_TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_IMAGE = {"sample": (BATCH, 3, 16, 16)}
_LATENT = (BATCH, 4, 8, 8)
_TEXT = (BATCH, 6, 32)

MODELS: dict[str, Small] = {
    "AuraFlowTransformer2DModel": Small(
        {"sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        {"hidden_states": _LATENT, "encoder_hidden_states": _TEXT, "timestep": (BATCH,)},
        "**.*_blocks.*",
    ),
    "AutoencoderDC": Small(
        {"latent_channels": 4, "attention_head_dim": 8, "encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16),
         "encoder_layers_per_block": (1, 2), "decoder_layers_per_block": (1, 2), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock")},
        _IMAGE,
        "**.*_blocks.*.*",
    ),
    "AutoencoderKL": Small(
        {**_UNET, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        _IMAGE, "**.*_blocks.*",
    ),
    "AutoencoderTiny": Small(
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        _IMAGE,
    ),
    "CogVideoXTransformer3DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "sample_width": 8, "sample_height": 8,
         "sample_frames": 5, "max_text_seq_length": 6, "dropout": 0.1},
        {"hidden_states": (BATCH, 2, 4, 8, 8), "encoder_hidden_states": _TEXT, "timestep": (BATCH,)},
        "transformer_blocks.*",
    ),
    "ControlNetModel": Small(
        {**_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32, "conditioning_embedding_out_channels": (16, 16), "attention_head_dim": 2},
        {"sample": _LATENT, "timestep": (BATCH,), "encoder_hidden_states": _TEXT, "controlnet_cond": (BATCH, 3, 16, 16)},
        "down_blocks.*",
    ),
    "DiTTransformer2DModel": Small(
        {**_TWO_HEADS, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4, "dropout": 0.1},
        {"hidden_states": _LATENT, "timestep": (BATCH,), "class_labels": (BATCH,)},
        "transformer_blocks.*",
    ),
    "FluxTransformer2DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (BATCH, 16, 4), "encoder_hidden_states": _TEXT, "pooled_projections": (BATCH, 32), "timestep": (BATCH,), "img_ids": (16, 3), "txt_ids": (6, 3)},
        "*transformer_blocks.*",
    ),
    "LTXVideoTransformer3DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 32},
        {"hidden_states": (BATCH, 16, 4), "encoder_hidden_states": _TEXT, "timestep": (BATCH,), "encoder_attention_mask": (BATCH, 6), "video_coords": (BATCH, 3, 16)},
        "transformer_blocks.*",
    ),
    "LatteTransformer3DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32,
         "num_embeds_ada_norm": 10, "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "video_length": 2, "dropout": 0.1},
        {"hidden_states": (BATCH, 4, 2, 8, 8), "encoder_hidden_states": _TEXT, "timestep": (BATCH,)},
        "*transformer_blocks.*",
    ),
    "Lumina2Transformer2DModel": Small(
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1,
         "multiple_of": 8, "axes_dim_rope": (4, 4, 8), "axes_lens": (32, 32, 32), "cap_feat_dim": 32},
        {"hidden_states": _LATENT, "timestep": (BATCH,), "encoder_hidden_states": _TEXT, "encoder_attention_mask": (BATCH, 6)},
    ),
    "MochiTransformer3DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "pooled_projection_dim": 32, "text_embed_dim": 32, "time_embed_dim": 8, "max_sequence_length": 6},
        {"hidden_states": (BATCH, 4, 2, 8, 8), "encoder_hidden_states": _TEXT, "timestep": (BATCH,), "encoder_attention_mask": (BATCH, 6)},
        "transformer_blocks.*",
    ),
    "PixArtTransformer2DModel": Small(
        {**_TWO_HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32, "norm_num_groups": 4, "dropout": 0.1, "use_additional_conditions": False},
        {"hidden_states": _LATENT, "encoder_hidden_states": _TEXT, "timestep": (BATCH,)},
        "transformer_blocks.*",
    ),
    "PriorTransformer": Small(
        {**_TWO_HEADS, "embedding_dim": 32, "num_embeddings": 6, "dropout": 0.1},
        {"hidden_states": (BATCH, 32), "timestep": (BATCH,), "proj_embedding": (BATCH, 32), "encoder_hidden_states": _TEXT},
        "transformer_blocks.*",
    ),
    "SD3Transformer2DModel": Small(
        {**_TWO_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 8, "qk_norm": "rms_norm"},
        {"hidden_states": _LATENT, "encoder_hidden_states": _TEXT, "pooled_projections": (BATCH, 32), "timestep": (BATCH,)},
        "transformer_blocks.*",
    ),
    "SanaTransformer2DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8, "dropout": 0.1},
        {"hidden_states": _LATENT, "encoder_hidden_states": _TEXT, "timestep": (BATCH,)},
        "transformer_blocks.*",
    ),
    "T5FilmDecoder": Small(
        {"input_dims": 8, "targets_length": 8, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64},
        {"decoder_input_tokens": (BATCH, 8, 8), "decoder_noise_time": (BATCH,)},
        "decoders.*",
    ),
    "Transformer2DModel": Small(
        {**_TWO_HEADS, "in_channels": 32, "norm_num_groups": 4, "cross_attention_dim": 32, "dropout": 0.1},
        {"hidden_states": (BATCH, 32, 4, 4), "encoder_hidden_states": _TEXT},
        "transformer_blocks.*",
    ),
    "UNet1DModel": Small(
        {"sample_size": 32, "block_out_channels": (32, 32, 64), "extra_in_channels": 64},
        {"sample": (BATCH, 2, 32), "timestep": (BATCH,)},
        "*_blocks.*",
    ),
    "UNet2DConditionModel": Small(
        {**_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 2, "dropout": 0.1},
        {"sample": _LATENT, "timestep": (BATCH,), "encoder_hidden_states": _TEXT},
        "*_blocks.*",
    ),
    "UNet2DModel": Small(
        {**_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8, "dropout": 0.1},
        {**_IMAGE, "timestep": (BATCH,)},
        "*_blocks.*",
    ),
    "UNet3DConditionModel": Small(
        {**_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32, "attention_head_dim": 8},
        {"sample": (BATCH, 4, 2, 8, 8), "timestep": (BATCH,), "encoder_hidden_states": _TEXT},
        "*_blocks.*",
    ),
    "VQModel": Small(
        {**_UNET, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 16},
        _IMAGE, "**.*_blocks.*",
    ),
    "WanTransformer3DModel": Small(
        {**_TWO_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 64, "rope_max_seq_len": 32},
        {"hidden_states": (BATCH, 4, 2, 8, 8), "timestep": (BATCH,), "encoder_hidden_states": _TEXT},
        "blocks.*",
    ),
}  # fmt: skip

#: Arguments that are no random numbers, and what they are.
MADE: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "timestep": lambda shape: torch.arange(1, shape[0] + 1),
    "class_labels": lambda shape: torch.arange(shape[0]),
    "encoder_attention_mask": lambda shape: torch.ones(shape, dtype=torch.bool),
    "decoder_noise_time": torch.rand,
}


def members() -> list[Member]:
    """One for each name."""
    return [
        Member(
            f"diffusers/{name}",
            build=partial(build, name),
            batch=partial(batch, name),
            recompute=partial(make_regions, where=small.blocks),
            recompute_by_torch=partial(checkpoint_by_torch, where=small.blocks),
        )
        for name, small in MODELS.items()
    ]


def build(name: str) -> nn.Module:
    """A model with random weights."""
    return getattr(imported("diffusers"), name)(**MODELS[name].sizes).train()


def batch(name: str, model: nn.Module) -> dict[str, Any]:
    """Random numbers of the shapes that the model reads, and times of its diffusion."""
    made: dict[str, Any] = {
        argument: MADE.get(argument, torch.randn)(shape)
        for argument, shape in MODELS[name].inputs.items()
    }
    if name == "T5FilmDecoder":
        made["encodings_and_masks"] = [(torch.randn(_TEXT), torch.ones(BATCH, 6))]
    return made
