"""Models of images: timm, torchvision, vit-pytorch, segmentation-models-pytorch."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.coverage.others.entry import Entry, Made, images, numbered

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "test_vit2": (64, {"img_size": 64}),
    "test_vit3": (64, {"img_size": 64}),
    "test_vit4": (64, {"img_size": 64}),
    "test_vit_relpos": (64, {"img_size": 64}),
    "deit_tiny_distilled_patch16_224": (
        32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    ),
    "deit3_small_patch16_224": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "samvit_base_patch16": (
        64, {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "window_size": 2,
            "global_attn_indexes": (1,),
             "neck_chans": 16},
    ),
    "vit_small_r26_s32_224": (64, {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "swin_tiny_patch4_window7_224": (
        64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "swinv2_tiny_window8_256": (
        64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "swinv2_cr_tiny_224": (
        64, {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "convnext_atto": (32, {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "convnextv2_atto": (32, {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "test_resnet": (64, {}),
    "resnet18": (32, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "resnetv2_50": (32, {"layers": (1, 1), "channels": (16, 32), "stem_chs": 8}),
    "resnetaa50": (32, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "seresnet50": (32, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "ecaresnet26t": (32, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "resnest14d": (64, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "skresnet18": (64, {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32)}),
    "res2net50_26w_4s": (32, {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}),
    "test_efficientnet": (32, {}),
    "efficientnet_lite0": (32, {}),
    "tf_efficientnetv2_b0": (32, {"channel_multiplier": 0.25, "depth_multiplier": 0.3}),
    "mobilenetv3_small_050": (32, {}),
    "mobilenetv4_conv_small_035": (32, {}),
    "lcnet_035": (32, {}),
    "fbnetc_100": (32, {}),
    "regnetx_002": (32, {}),
    "regnety_002": (32, {}),
    "beit_base_patch16_224": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "beitv2_base_patch16_224": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "cait_xxs24_224": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}),
    "test_maxvit": (64, {"img_size": 64}),
    "test_coatnet": (64, {"img_size": 64}),
    "coat_tiny": (
        32, {"img_size": 32, "embed_dims": (64, 64, 64, 64), "serial_depths": (1, 1, 1, 1), "parallel_depth": 1,
             "num_heads": 8},
    ),
    "davit_tiny": (
        64, {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "window_size": 4},
    ),
    "edgenext_xx_small": (64, {"dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "heads": (2, 2, 2, 2)}),
    "ghostnet_050": (32, {}),
    "ghostnetv2_100": (64, {}),
    "hrnet_w18_small": (64, {}),
    "inception_v3": (96, {}),
    "inception_next_atto": (32, {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}),
    "levit_128s": (64, {"embed_dim": (16, 32), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 4), "img_size": 64}),
    "test_nfnet": (64, {}),
    "pit_ti_224": (64, {"img_size": 64, "base_dims": (16, 16, 16), "depth": (1, 1, 1), "heads": (1, 2, 4)}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 32), "num_heads": (1, 2, 2, 2)}),
    "repvgg_a0": (32, {}),
    "test_byobnet": (32, {}),
    "rexnet_100": (32, {"width_mult": 0.3}),
    "sequencer2d_s": (
        32, {"layers": (1, 1), "embed_dims": (16, 32), "hidden_sizes": (4, 8), "patch_sizes": (4, 2), "img_size": 32,
             "mlp_ratios": (3.0, 3.0)},
    ),
    "tnt_s_legacy_patch16_224": (
        32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_outer": 2,
             "num_heads_inner": 2},
    ),
    "twins_svt_small": (
        64, {"img_size": 64, "embed_dims": (16, 32, 32, 64), "num_heads": (1, 2, 2, 4), "depths": (2, 2, 2, 2),
             "wss": (4, 4, 4, 2)},
    ),
    "twins_pcpvt_small": (64, {"img_size": 64, "embed_dims": (16, 32, 32, 64), "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 2, 4)}),
    "visformer_tiny": (64, {"img_size": 64, "embed_dim": 48, "depth": (1, 1, 1), "num_heads": 2}),
    "xception41": (64, {}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "vit_small_patch16_dinov3": (32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 16, "stages": (1, 1, 1), "num_heads": 1, "q_pool": 2}),
    "fastvit_t8": (64, {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 64)}),
    "tiny_vit_5m_224": (64, {"embed_dims": (16, 32, 32, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2),
                             "window_sizes": (4, 4, 4, 2)}),
    "convit_tiny": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 3, "num_heads": 2,
                         "local_up_to_layer": 2}),
    "crossvit_9_240": (240, {"embed_dim": (16, 32), "depth": ((1, 1, 0),), "num_heads": (2, 2)}),
    "densenet121": (32, {"block_config": (2, 2), "growth_rate": 8}),
    "dla34": (32, {"levels": (1, 1, 1, 1, 1, 1), "channels": (8, 8, 8, 16, 16, 32)}),
    "dpn48b": (32, {"k_sec": (1, 1, 1, 1), "inc_sec": (4, 4, 4, 4), "k_r": 32, "groups": 4, "num_init_features": 8}),
    "efficientformer_l1": (224, {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 32, 32)}),
    "efficientformerv2_s0": (64, {"img_size": 64, "depths": (1, 1, 2, 2), "embed_dims": (8, 16, 32, 32)}),
    "efficientvit_b0": (64, {"depths": (1, 1, 1, 1)}),
    "efficientvit_m0": (64, {"img_size": 64, "depth": (1, 1, 1)}),
    "hgnetv2_b0": (32, {}),
    "test_mambaout": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "naflexvit_base_patch16_gap": (32, {"embed_dim": 32, "depth": 2, "num_heads": 2}),
    "rdnet_tiny": (32, {"num_init_features": 16, "growth_rates": (8, 8), "num_blocks_list": (1, 1),
        "block_type": ("Block", "Block"), "is_downsample_block": (None, True), "transition_compression_ratio": 0.5}),
    "repvit_m0_9": (64, {"embed_dim": (8, 16, 16, 32), "depth": (1, 1, 1, 1)}),
    "repghostnet_050": (32, {}),
    "selecsls42": (64, {}),
    "shvit_s1": (64, {"embed_dim": (16, 32, 48), "partial_dim": (8, 8, 16), "depth": (1, 1, 1)}),
    "starnet_s050": (32, {"depths": (1, 1, 1, 1), "base_dim": 8}),
    "swiftformer_xs": (64, {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32)}),
    "tresnet_m": (32, {"layers": (1, 1, 1, 1), "width_factor": 0.25}),
    "vitamin_small_224": (64, {"img_size": 64}),
    "botnet26t_256": (64, {"img_size": 64}),
    "lambda_resnet26rpt_256": (64, {"img_size": 64}),
}  # fmt: skip
"""A constructor of timm: the side of its images, and what makes it small."""

TIMM_CLASSES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "MlpMixer": ("mlp_mixer", "MlpMixer", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}),
    "ResMLP": (
        "mlp_mixer", "MlpMixer", 32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2, "mlp_ratio": 4, "block_layer": "ResBlock",
         "norm_layer": "Affine"},
    ),
    "gMLP": (
        "mlp_mixer", "MlpMixer", 32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2, "mlp_ratio": 4,
         "block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp"},
    ),
    "PoolFormer": ("metaformer", "MetaFormer", 32, {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32),
        "mlp_bias": True}),
    "ConvFormer": (
        "metaformer", "MetaFormer", 32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "token_mixers": "SepConv"},
    ),
    "Volo": (
        "volo", "VOLO", 64,
        {"img_size": 64, "layers": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "stem_hidden_dim": 16},
    ),
    "GlobalContextVit": (
        "gcvit", "GlobalContextVit", 64,
        {"img_size": 64, "embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 4), "window_size": (4, 4, 4,
            2)},
    ),
    "FocalNet": (
        "focalnet", "FocalNet", 32, {"depths": (1, 1), "embed_dim": 16, "focal_levels": (2, 2), "focal_windows": (3,
            3)},
    ),
    "Nest": (
        "nest", "Nest", 64,
        {"img_size": 64, "embed_dims": (16, 16, 32), "num_heads": (2, 2, 2), "depths": (1, 1, 1),
            "drop_path_rate": 0.0},
    ),
    "ConvMixer": ("convmixer", "ConvMixer", 32, {"dim": 16, "depth": 2, "patch_size": 4}),
    "VGG": ("vgg", "VGG", 32, {"cfg": (8, "M", 16, "M", 32, "M")}),
}  # fmt: skip
"""Classes of timm whose registered constructors do not let themselves be made small."""


def _timm_class(module: str, name: str, size: int, kwargs: dict[str, Any]) -> Made:
    """A value that names something in the module stands for it."""
    home = import_module(f"timm.models.{module}")
    named = {key: getattr(home, value) if isinstance(value, str) else value for key, value in kwargs.items()}
    return getattr(home, name)(num_classes=10, **named), images(size)


def _timm_mvit() -> Made:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    cfg = MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=(1, 2), stride_q=((1, 1), (2, 2)))
    return MultiScaleVit(cfg, img_size=(64, 64), num_classes=10), images(64)


def _timm(name: str, size: int, kwargs: dict[str, Any]) -> Made:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **kwargs), images(size)


VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
"""What most models of vit-pytorch take."""
PLAIN = VIT | {"dim_head": 16}


def _vit_pytorch(module: str, name: str, size: int, kwargs: dict[str, Any]) -> Made:
    return getattr(import_module(f"vit_pytorch.{module}"), name)(**kwargs), images(size)


VIT_PYTORCH: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ViT": ("vit", "ViT", 32, PLAIN),
    "ViT, dropout": ("vit", "ViT", 32, PLAIN | {"dropout": 0.1, "emb_dropout": 0.1}),
    "SimpleViT": ("simple_vit", "SimpleViT", 32, PLAIN),
    "CaiT": ("cait", "CaiT", 32, PLAIN | {"cls_depth": 1}),
    "DeepViT": ("deepvit", "DeepViT", 32, PLAIN),
    "ParallelViT": ("parallel_vit", "ViT", 32, PLAIN),
    "CvT": (
        "cvt", "CvT", 64,
        {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 16, "s2_heads": 1, "s2_depth": 1, "s3_emb_dim": 32,
         "s3_heads": 2, "s3_depth": 1},
    ),
    "T2TViT": ("t2t", "T2TViT", 32, {"image_size": 32, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2,
        "mlp_dim": 64,
                                    "dim_head": 16, "t2t_layers": ((7, 4), (3, 2))}),
    "CCT": ("cct", "CCT", 32, {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 7,
        "stride": 2, "padding": 3, "pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1,
        "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 10, "positional_embedding": "learnable"}),
    "CrossViT": (
        "cross_vit", "CrossViT", 32,
        {"image_size": 32, "num_classes": 10, "sm_dim": 16, "lg_dim": 32, "sm_patch_size": 8, "sm_enc_heads": 2,
         "sm_enc_mlp_dim": 32, "sm_enc_dim_head": 8, "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_heads": 2,
         "lg_enc_mlp_dim": 32, "lg_enc_dim_head": 8, "cross_attn_depth": 1, "cross_attn_heads": 2,
         "cross_attn_dim_head": 8, "depth": 1, "dropout": 0.0, "emb_dropout": 0.0},
    ),
    "PiT": ("pit", "PiT", 32, PLAIN | {"depth": (1, 1)}),
    "LeViT": ("levit", "LeViT", 64, {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (16, 32), "depth": 1,
                                    "heads": (2, 2), "mlp_mult": 2, "dim_key": 8, "dim_value": 8}),
    "MaxViT": ("max_vit", "MaxViT", 64, {"num_classes": 10, "dim": 16, "dim_conv_stem": 8, "dim_head": 8,
        "depth": (1, 1),
                                        "window_size": 4, "dropout": 0.0}),
    "NesT": ("nest", "NesT", 32, {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
                                 "block_repeats": (1, 1), "num_classes": 10, "dim_head": 8}),
    "MobileViT": ("mobile_vit", "MobileViT", 64, {"image_size": (64, 64), "dims": [16, 24, 32], "num_classes": 10,
                  "channels": [8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 64], "depths": (1, 1, 1)}),
    "TwinsSVT": ("twins_svt", "TwinsSVT", 64, {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32,
                 "s4_emb_dim": 32, "s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2,
                 "s4_local_patch_size": 2, "s1_global_k": 4, "s2_global_k": 4, "s3_global_k": 2, "s4_global_k": 2,
                 "s3_depth": 1, "s4_depth": 1}),
    "RegionViT": ("regionvit", "RegionViT", 64, {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2,
                  "num_classes": 10}),
    "ScalableViT": ("scalable_vit", "ScalableViT", 64, {"num_classes": 10, "dim": 16, "heads": (2, 2), "depth": (1, 1),
                    "ssa_dim_key": (8, 8), "reduction_factor": (4, 2), "window_size": (8, None), "dropout": 0.0}),
    "SepViT": ("sep_vit", "SepViT", 56, {"num_classes": 10, "dim": 16, "dim_head": 8, "heads": (1, 2), "depth": (1,
        1)}),
    "RvT": ("rvt", "RvT", 32, PLAIN),
    "XCiT": ("xcit", "XCiT", 32, PLAIN | {"cls_depth": 1}),
    "small dataset": ("vit_for_small_dataset", "ViT", 32, PLAIN),
    "patch merger": ("vit_with_patch_merger", "ViT", 32, PLAIN | {"patch_merge_layer": 1,
        "patch_merge_num_tokens": 4}),
    "patch dropout": ("vit_with_patch_dropout", "ViT", 32, PLAIN | {"patch_dropout": 0.25}),
    "adaptive token sampling": ("ats_vit", "ViT", 32, PLAIN | {"max_tokens_per_depth": (12, 8)}),
    "fft": ("simple_vit_with_fft", "SimpleViT", 32, PLAIN | {"freq_patch_size": 8}),
    "register tokens": ("simple_vit_with_register_tokens", "SimpleViT", 32, PLAIN),
    "qk norm": ("simple_vit_with_qk_norm", "SimpleViT", 32, PLAIN),
    "value residual": ("simple_vit_with_value_residual", "SimpleViT", 32, PLAIN),
    "hyper-connections": ("simple_vit_with_hyper_connections", "SimpleViT", 32, PLAIN | {"num_residual_streams": 2}),
    "normalized": ("normalized_vit", "nViT", 32, PLAIN),
    "jumbo": ("jumbo_vit", "JumboViT", 32, PLAIN | {"num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 1}),
    "decorrelation": ("vit_with_decorr", "ViT", 32, PLAIN),
}  # fmt: skip


def _distilled() -> Made:
    import torch
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    teacher = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(), nn.Linear(128, 10))
    wrapper = DistillWrapper(teacher=teacher, student=DistillableViT(**PLAIN), temperature=3, alpha=0.5)
    return wrapper, {"img": images(32), "labels": torch.tensor([1, 2, 3, 4])}


def _adapter() -> Made:
    from vit_pytorch.learnable_memory_vit import Adapter, ViT

    return Adapter(vit=ViT(**PLAIN), num_classes=2, num_memories_per_layer=3), images(32)


def _segmentation(name: str, encoder: str, size: int, kwargs: dict[str, Any]) -> Made:
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)(encoder_name=encoder, encoder_weights=None, in_channels=3, classes=3, **kwargs)
    return model, images(size)


SEGMENTATION: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Unet": ("timm-mobilenetv3_small_minimal_100", 32, {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}),
    "UnetPlusPlus": ("timm-mobilenetv3_small_minimal_100", 32, {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}),
    "FPN": ("timm-mobilenetv3_small_minimal_100", 64, {"decoder_pyramid_channels": 32,
        "decoder_segmentation_channels": 32}),
    "Linknet": ("timm-mobilenetv3_small_minimal_100", 32, {"encoder_depth": 3}),
    "PSPNet": ("timm-mobilenetv3_small_minimal_100", 64, {"psp_out_channels": 16}),
    "DeepLabV3Plus": ("timm-mobilenetv3_small_minimal_100", 64, {"decoder_channels": 16}),
    "MAnet": ("timm-mobilenetv3_small_minimal_100", 32, {"encoder_depth": 3, "decoder_channels": (16, 8, 8),
        "decoder_pab_channels": 8}),
    "PAN": ("timm-mobilenetv3_small_minimal_100", 128, {"decoder_channels": 8}),
    "UPerNet": ("timm-mobilenetv3_small_minimal_100", 64, {"decoder_channels": 16}),
    "Segformer": ("mit_b0", 64, {"decoder_segmentation_channels": 16}),
}  # fmt: skip


def _torchvision(name: str, size: int, kwargs: dict[str, Any]) -> Made:
    from torchvision import models

    return getattr(models, name)(weights=None, num_classes=10, **kwargs), images(size)


TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (32, {"width_per_group": 64}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (64, {}),
    "mnasnet0_5": (32, {}),
    "alexnet": (64, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
}


def entries() -> list[Entry]:
    """All of them."""
    vit = {name: partial(_vit_pytorch, *values) for name, values in VIT_PYTORCH.items()}
    vit |= {"distillation": _distilled, "memories": _adapter}
    classes = {name: partial(_timm_class, *values) for name, values in TIMM_CLASSES.items()}
    return [
        *numbered("timm", "images", classes | {"MultiScaleVit": _timm_mvit}),
        *numbered("timm", "images", {name: partial(_timm, name, *values) for name, values in TIMM.items()}),
        *numbered("torchvision", "images", {k: partial(_torchvision, k, *v) for k, v in TORCHVISION.items()}),
        *numbered("vit-pytorch", "images", vit),
        *numbered(
            "segmentation-models-pytorch", "segmentation",
            {name: partial(_segmentation, name, *values) for name, values in SEGMENTATION.items()},
        ),
    ]  # fmt: skip
