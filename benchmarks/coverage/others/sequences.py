"""Models of sequences, and of images with words: x-transformers, openai-whisper, open_clip."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.others.entry import ROWS, Entry, Made, images, numbered, tokens

VOCABULARY, LENGTH = 48, 16
SMALL = {"dim": 32, "depth": 2, "heads": 2, "attn_dim_head": 16}

DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary, xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5's bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "grouped queries": {"heads": 4, "attn_dim_head": 8, "attn_kv_heads": 2},
    "one key head": {"attn_one_kv_head": True},
    "RMSNorm, SwiGLU": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "ScaleNorm": {"use_scalenorm": True},
    "simple RMSNorm": {"use_simple_rmsnorm": True},
    "squared ReLU": {"ff_relu_squared": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "memory keys": {"attn_num_mem_kv": 4},
    "talking heads": {"attn_pre_talking_heads": True},
    "normed queries": {"attn_qk_norm": True, "attn_qk_norm_scale": 10},
    "sparse top": {"attn_sparse_topk": 4},
    "gated values": {"attn_gate_values": True},
    "on attention": {"attn_on_attn": True},
    "shifted tokens": {"shift_tokens": 1},
    "residual gates": {"gate_residual": True},
    "residual attention": {"residual_attn": True},
    "hyper-connections": {"num_residual_streams": 2},
    "value residual": {"add_value_residual": True, "learned_value_residual_mix": True},
    "norms after": {"pre_norm": False},
    "flash": {"attn_flash": True},
    "softclamped": {"attn_softclamp_logits": True},
    "forgetting": {"attn_data_dependent_alibi": True},
    "dropout": {"layer_dropout": 0.0, "attn_dropout": 0.1, "ff_dropout": 0.1},
    "laser": {"attn_laser": True},
}


def _decoder(wrapper: dict[str, Any], layers: dict[str, Any]) -> Made:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=2 * LENGTH, attn_layers=Decoder(**SMALL | layers), **wrapper
    )
    return AutoregressiveWrapper(model), tokens(VOCABULARY, LENGTH + 1)


def _encoder() -> Made:
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=LENGTH, num_memory_tokens=2, attn_layers=Encoder(**SMALL)
    )
    mask = torch.arange(LENGTH)[None] < torch.tensor([16, 12, 9, 16])[:, None]
    return model, {"x": tokens(VOCABULARY), "mask": mask}


def _translator() -> Made:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=2, enc_max_seq_len=LENGTH, dec_num_tokens=VOCABULARY,
        dec_depth=2, dec_heads=2, dec_max_seq_len=LENGTH, tie_token_emb=True, enc_attn_dim_head=16,
        dec_attn_dim_head=16,
    )  # fmt: skip
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return model, {"src": tokens(VOCABULARY), "tgt": tokens(VOCABULARY, 12), "mask": mask}


def _vision_caption() -> Made:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(**SMALL)), images(32)


def _continuous() -> Made:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    model = ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=LENGTH, attn_layers=Decoder(**SMALL))
    return model, torch.randn(ROWS, LENGTH, 8, generator=torch.Generator().manual_seed(2))


def _masked() -> Made:
    from x_transformers import Encoder, NonAutoregressiveWrapper, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY + 1, logits_dim=VOCABULARY, max_seq_len=LENGTH, attn_layers=Encoder(**SMALL)
    )
    return NonAutoregressiveWrapper(model, mask_id=VOCABULARY), tokens(VOCABULARY)


def _whisper() -> Made:
    from whisper.model import ModelDimensions, Whisper

    dims = ModelDimensions(
        n_mels=8, n_audio_ctx=16, n_audio_state=32, n_audio_head=2, n_audio_layer=2, n_vocab=VOCABULARY, n_text_ctx=12,
        n_text_state=32, n_text_head=2, n_text_layer=2,
    )  # fmt: skip
    mel = torch.randn(ROWS, 8, 32, generator=torch.Generator().manual_seed(3))
    return Whisper(dims), {"mel": mel, "tokens": tokens(VOCABULARY, 12)}


class Contrastive(nn.Module):
    """open_clip's model under its loss, as its training script puts them together."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """The loss under its name, from f32[rows, 3, side, side] and i64[rows, tokens]."""
        features = self.model(image, text)
        return dict(self.loss(**features, output_dict=True))


def _clip(loss: str, coca: bool = False, vision: dict[str, Any] | None = None, **kwargs: Any) -> Made:
    import open_clip
    from open_clip import loss as losses
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    sees = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16} | (vision or {})
    reads = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 2}
    text = tokens(VOCABULARY - 1)
    text[:, -1] = VOCABULARY - 1
    if coca:
        from open_clip.coca_model import CoCa, MultimodalCfg

        model = CoCa(
            32, MultimodalCfg(**reads, dim_head=16), CLIPTextCfg(**reads, embed_cls=True, output_tokens=True),
            CLIPVisionCfg(
                **sees, attentional_pool=True, attn_pooler_heads=2, attn_pooler_queries=9, output_tokens=True,
            ),
        )  # fmt: skip
        projection: Any = model.text_decoder.text_projection
        torch.nn.init.normal_(projection, std=0.2)  # which the library leaves as memory was
        made = losses.CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)
    else:
        model = CLIP(16, CLIPVisionCfg(**sees), CLIPTextCfg(**reads), output_dict=True, **kwargs)
        made = getattr(losses, loss)()
    assert open_clip
    return Contrastive(model, made), {"image": images(32), "text": text}


def entries() -> list[Entry]:
    """All of them."""
    made = {name: partial(_decoder, {}, flags) for name, flags in DECODERS.items()}
    made |= {
        "memory tokens": partial(_decoder, {"num_memory_tokens": 2}, {}),
        "tied": partial(_decoder, {"tie_embedding": True, "use_abs_pos_emb": False}, {"rotary_pos_emb": True}),
        "recycled": partial(_decoder, {"recycling": True, "train_max_recycle_steps": 2}, {}),
        "mixture of softmaxes": partial(_decoder, {"mixture_of_softmax": True, "mixture_of_softmax_k": 2}, {}),
        "embedded l2": partial(_decoder, {"l2norm_embed": True, "post_emb_norm": True, "emb_frac_gradient": 0.5}, {}),
    }
    others = {"encoder": _encoder, "XTransformer": _translator, "ViTransformerWrapper": _vision_caption}
    others |= {"ContinuousTransformerWrapper": _continuous, "NonAutoregressiveWrapper": _masked}
    clips = {
        "CLIP": partial(_clip, "ClipLoss"),
        "CLIP, SigLIP's loss": partial(_clip, "SigLipLoss", init_logit_bias=-10.0),
        "CLIP of a ResNet": partial(_clip, "ClipLoss", vision={"layers": (1, 1, 1, 1), "width": 8}),
        "CoCa": partial(_clip, "", coca=True),
    }
    return [
        *numbered("x-transformers", "decoder", made),
        *numbered("x-transformers", "others", others),
        *numbered("openai-whisper", "speech", {"Whisper": _whisper}),
        *numbered("open_clip_torch", "images and words", clips),
    ]
