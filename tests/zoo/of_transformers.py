"""Models of transformers: every architecture that the sizes below make small."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import checkpoint_by_torch, make_regions
from tests.zoo.members import Member, imported

BATCH, LENGTH, VOCABULARY, PIXELS, MELS = 2, 16, 100, 32, 8

#: Names by the head that they are built with, as transformers' `AutoModelFor...` has it.
NAMES = {
    "Seq2SeqLM": """
        bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5
        mvp nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2
        switch_transformers t5 umt5
    """,
    "MaskedLM": """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert
        electra ernie esmc eurobert fnet gte ibert jina_embeddings_v3 layoutlm longformer
        megatron-bert mobilebert modernbert mpnet mra neomme nomic_bert nystromformer rembert
        roberta roberta-prelayernorm roformer squeezebert tapas ultrabert xlm-roberta
        xlm-roberta-xl yoso
    """,
    "CausalLM": """
        afmoe apertus apertus1p5_text arcee aria_text axk2 bailing_hybrid bamba beam
        bert-generation biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cpmant ctrl cwm
        deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dory dots3_note_text
        ernie4_5 exaone exaone4 exaone_moe falcon falcon_mamba flex_olmo flint gemma gemma2
        gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3
        gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hy_v3 hy_v4
        hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2
        jamba jetmoe kolibri1 laguna lara_mini lfm2 lfm3 llama llama4_text longcat_flash mamba
        mamba2 mellum minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral
        modernbert-decoder moshi mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
        olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
        qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rwkv sarvam_mla
        sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlnet
        xlstm youtu
    """,
    "ImageClassification": """
        beit bit convnext convnextv2 data2vec-vision deit dinov2 dinov2_with_registers
        focalnet hiera ijepa imagegpt mobilenet_v2 poolformer pp_lcnet pvt regnet resnet
        segformer swin swinv2 vit vit_msn
    """,
    "CTC": "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wavlm",
    "SpeechSeq2Seq": "speech_to_text whisper",
}


def _each(size: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


#: What configurations call their sizes, and how large each is in the zoo.
SIZES: dict[str, Any] = {
    **_each(
        32,
        """
        attention_hidden_size d_model dim embed_dim embedding_size expert_ffn_hidden_size
        hidden_size lru_width mamba_d_head moe_intermediate_size n_embd
        shared_expert_intermediate_size
        """,
    ),
    **_each(
        64,
        """
        d_ff decoder_ffn_dim dff encoder_ffn_dim feed_forward_size ffn_dim ffn_hidden_size
        intermediate_size max_position_embeddings max_seq_len max_source_positions
        max_target_positions model_max_length n_positions
        """,
    ),
    **_each(
        2,
        """
        decoder_attention_heads decoder_layers encoder_attention_heads encoder_layers
        index_n_heads linear_num_key_heads linear_num_value_heads mamba_n_heads n_head n_heads
        n_layer n_layers num_attention_heads num_decoder_layers num_encoder_layers
        num_experts_per_tok num_experts_per_token num_heads num_hidden_layers
        num_key_value_heads num_kv_heads num_layers
        """,
    ),
    **_each(
        4,
        """
        index_topk mamba_num_heads moe_num_experts n_routed_experts num_experts
        num_local_experts sliding_window time_step_rank
        """,
    ),
    **_each(
        8,
        """
        block_size chunk_size mamba_chunk_size mamba_d_state patch_size qk_nope_head_dim
        qk_rope_head_dim rotary_dim state_size
        """,
    ),
    **_each(
        16,
        """
        d_kv head_dim index_head_dim kv_lora_rank linear_key_head_dim linear_value_head_dim
        mamba_head_dim q_lora_rank qk_head_dim v_head_dim
        """,
    ),
    **_each(1, "n_group n_groups topk_group"),
    **_each(VOCABULARY, "unpadded_vocab_size vocab_size"),
    **_each(
        0.1,
        "attention_dropout attention_probs_dropout_prob dropout hidden_dropout_prob",
    ),
    "attention_window": [4, 4],
    "bos_token_id": 1,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "image_size": PIXELS,
    "num_mel_bins": MELS,
    "pad_token_id": 0,
    "use_cache": False,
}

_LATENT = {"head_dim": 8}  # of multi-head latent attention: the part that rotates
_FOUR_STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
_WINDOWS = {
    "depths": [2, 2],
    "embed_dim": 16,
    "num_heads": [2, 2],
    "patch_size": 2,
    "window_size": 4,
}
_AUDIO = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
}

#: What a model needs besides.
CHANGES: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 8, "num_groups": 4, **_FOUR_STAGES},
    "convnext": {**_FOUR_STAGES, "patch_size": 2},
    "convnextv2": {**_FOUR_STAGES, "patch_size": 2},
    "data2vec-audio": _AUDIO,
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "diffllama": {"attention_dropout": 0.0},
    "focalnet": {"depths": [1, 2], "embed_dim": 16, "focal_levels": [2, 2],
                 "focal_windows": [3, 3], "hidden_sizes": [16, 32], "patch_size": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hiera": {"depths": [1, 2], "embed_dim": 16, "embed_dim_multiplier": 2.0,
              "image_size": [PIXELS, PIXELS], "masked_unit_size": [4, 4],
              "num_heads": [1, 2], "num_query_pool": 1, "patch_size": [7, 7],
              "query_stride": [2, 2]},
    "hubert": _AUDIO,
    "longcat_flash": _LATENT,
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "poolformer": {**_FOUR_STAGES, "patch_size": 7},
    "pvt": {**_FOUR_STAGES, "num_attention_heads": [1, 2, 3, 4]},
    "regnet": {"embedding_size": 8, "groups_width": 8, **_FOUR_STAGES},
    "resnet": {"embedding_size": 8, **_FOUR_STAGES},
    "segformer": {**_FOUR_STAGES, "num_attention_heads": [1, 2, 3, 4]},
    "speech_to_text": {"conv_channels": 16, "input_feat_per_channel": MELS},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "unispeech": _AUDIO,
    "unispeech-sat": _AUDIO,
    "wav2vec2": _AUDIO,
    "wavlm": _AUDIO,
    "whisper": {"max_source_positions": 2 * LENGTH},
    "youtu": _LATENT,
}  # fmt: skip


def members() -> list[Member]:
    """One for each name."""
    return [
        Member(
            f"transformers/{name}",
            build=partial(build, name, head),
            batch=partial(batch, head=head),
            recompute=recompute,
            recompute_by_torch=recompute_by_torch,
        )
        for head, names in NAMES.items()
        for name in names.split()
    ]


def build(name: str, head: str) -> nn.Module:
    """A model with random weights, its configuration filled in from the table of sizes."""
    transformers = imported("transformers")
    transformers.logging.set_verbosity_error()
    default = transformers.AutoConfig.for_model(name)
    known = default.to_dict()
    sizes = {key: size for key, size in SIZES.items() if known.get(key) is not None}
    config = type(default)(**{**sizes, **CHANGES.get(name, {})})
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).train()


def batch(model: nn.Module, head: str) -> dict[str, Tensor]:
    """Tokens, pixels, a waveform or its frequencies."""
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH))
    inputs = {
        "pixel_values": lambda: torch.randn(BATCH, 3, PIXELS, PIXELS),
        "input_values": lambda: torch.randn(BATCH, 800),
        "input_features": lambda: frequencies(model),
    }
    name: Any = model.main_input_name
    made = {name: inputs[name]() if name in inputs else ids}
    return made | ({"decoder_input_ids": ids} if "Seq2Seq" in head else {})


def frequencies(model: nn.Module) -> Tensor:
    """What a model of speech reads: Whisper has the frequencies before the frames."""
    found = torch.randn(BATCH, MELS, 4 * LENGTH)
    return found if type(model).__name__.startswith("Whisper") else found.mT


def recompute(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Makes regions by the model's own hook, or of its repeated layers where it has none."""
    if model.supports_gradient_checkpointing:
        imported("remat.interop.transformers").enable(model, **options)
    else:
        make_regions(model, options)


def recompute_by_torch(model: Any) -> None:
    """Has the model use torch's checkpoint by its own hook, or puts it around the layers."""
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        checkpoint_by_torch(model)
