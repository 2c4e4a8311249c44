"""Small versions of the architectures that people have, with random weights."""

from typing import Any

from zoo_builders import (
    Architecture,
    GraphNet,
    GroupedAttention,
    captioned,
    convnext,
    encoder,
    graph_by_matrix,
    graph_by_pairs,
    hugging_face,
    images,
    mixer,
    mlp,
    mobilenet_v3,
    noise,
    pixels,
    poolformer,
    regnet,
    resnet,
    resnetv2,
    run,
    speech,
    swin,
    timm,
    timm_model,
    torchvision,
    waves,
)
from zoo_language import BERT, ENCODER_DECODER, LANGUAGE, SIZES

__all__ = ["ZOO", "Architecture", "GroupedAttention", "run"]

SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}
SMALL_SWIN: dict[str, Any] = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (1, 1),
    "num_heads": (2, 4),
}
VISION: dict[str, Any] = SIZES | {"image_size": 32, "patch_size": 8}
BOTH: dict[str, Any] = {
    "text_config": BERT | {"max_position_embeddings": 16, "projection_dim": 16},
    "vision_config": VISION | {"projection_dim": 16},
}
HF_SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
SOUND: dict[str, Any] = BERT | {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,  # it masks at random, drawn by numpy
}

TORCHVISION = {
    "vit_b_16": Architecture(
        torchvision("VisionTransformer", 32, 8, 2, 4, 48, 96, num_classes=10),
        images(),
        feed_forward=2,
        resumes=True,
    ),
    "swin_t": Architecture(swin(""), images(), feed_forward=4, resumes=True),
    "swin_v2_t": Architecture(swin("V2"), images(), feed_forward=8),
    "resnet18": Architecture(resnet("BasicBlock"), images(), channels=5, resumes=True),
    "resnet50": Architecture(
        resnet("Bottleneck", width_per_group=16), images(), feed_forward=1, channels=8, resumes=True
    ),
    "resnext50": Architecture(
        resnet("Bottleneck", groups=4, width_per_group=4), images(), feed_forward=1, channels=4
    ),
    "regnet_y": Architecture(regnet, images(), feed_forward=4),
    "densenet": Architecture(
        torchvision("DenseNet", 8, (2, 2), 16, 2, num_classes=10), images(), channels=4
    ),
    "mobilenet_v2": Architecture(
        torchvision("MobileNetV2", 10, 0.5, [[1, 16, 1, 1], [4, 24, 2, 2]]),
        images(),
        feed_forward=2,
        channels=3,
    ),
    "mobilenet_v3_small": Architecture(mobilenet_v3, images(), feed_forward=6, resumes=True),
    "convnext_tiny": Architecture(convnext, images(), feed_forward=2, resumes=True),
    # Closed units stay: a table of the bias by position has a column for each head.
    "maxvit": Architecture(
        torchvision("MaxVit", (32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10),
        images(),
        feed_forward=7,
        heads=4,
        channels=1,
        notes=4,
    ),
}

TIMM = {
    "vit_tiny": Architecture(
        timm_model("vit_tiny_patch16_224", num_heads=3, **SMALL_VIT),
        images(),
        feed_forward=2,
        heads=2,
        resumes=True,
    ),
    "deit3": Architecture(
        timm_model("deit3_small_patch16_224", num_heads=6, **SMALL_VIT),
        images(),
        feed_forward=2,
        heads=2,
        resumes=True,
    ),
    # Closed units stay: the class attention reshapes by the width of its input.
    "cait": Architecture(
        timm_model("cait_xxs24_224", num_heads=4, **SMALL_VIT),
        images(),
        feed_forward=6,
        heads=2,
        notes=2,
    ),
    "beit": Architecture(
        timm_model("beit_base_patch16_224", num_heads=4, **SMALL_VIT), images(), feed_forward=2
    ),
    "eva": Architecture(
        timm_model("eva02_tiny_patch14_224", num_heads=3, **SMALL_VIT), images(), feed_forward=2
    ),
    "mixer": Architecture(mixer(), images(), feed_forward=4, resumes=True),
    # Nothing: one half of the units is normed and mixed over positions, then multiplies the other.
    "gmlp": Architecture(
        mixer(block_layer="SpatialGatingBlock", mlp_layer="GatedMlp", mlp_ratio=4), images()
    ),
    "resmlp": Architecture(
        mixer(block_layer="ResBlock", norm_layer="Affine", mlp_ratio=2),
        images(),
        feed_forward=2,
        uncounted=True,
    ),
    "poolformer": Architecture(poolformer, images(), feed_forward=2),
    # Closed units stay: the cross attention reshapes by the width of its input.
    "crossvit": Architecture(
        timm(
            "crossvit.CrossVit",
            32,
            (1.0, 1.0),
            (8, 16),
            embed_dim=(16, 32),
            depth=((1, 1, 0),),
            num_heads=(2, 2),
            mlp_ratio=(2.0, 2.0, 1.0),
        ),
        images(),
        feed_forward=2,
        heads=4,
        notes=2,
    ),
    # Closed units stay: attention reshapes by the width of its input, or splits channels by a list.
    "coat": Architecture(
        timm(
            "coat.CoaT",
            img_size=32,
            patch_size=4,
            embed_dims=(32, 32, 32, 32),
            serial_depths=(1, 1, 1, 1),
            parallel_depth=1,
            num_heads=8,
            mlp_ratios=(2, 2, 2, 2),
        ),
        images(),
        feed_forward=4,
        channels=7,
        notes=7,
    ),
    "resnetv2": Architecture(resnetv2, images(), feed_forward=1, channels=4),
    # Nothing: its convolutions standardize their weights, in a class of their own.
    "bit": Architecture(
        timm("resnetv2.ResNetV2", (1, 1), (128, 128), stem_chs=32, stem_type="fixed"), images()
    ),
    "efficientnet": Architecture(
        timm_model("test_efficientnet"), images(), feed_forward=6, channels=5
    ),
    "nfnet": Architecture(timm_model("test_nfnet"), images(), feed_forward=4),
    # Closed units stay: splits channels by a tuple of sizes.
    "mambaout": Architecture(
        timm_model("test_mambaout"), images(), feed_forward=1, channels=7, notes=6
    ),
    # Closed units stay: a table of the bias by position has a column for each head.
    "timm_swin": Architecture(
        timm_model("swin_tiny_patch4_window7_224", **SMALL_SWIN),
        images(),
        feed_forward=2,
        heads=2,
        notes=2,
    ),
    "timm_swin_v2": Architecture(
        timm_model("swinv2_tiny_window8_256", **SMALL_SWIN), images(), feed_forward=4
    ),
    # Closed units stay: reshapes by the width of its input, with a temperature for each head.
    "xcit": Architecture(
        timm_model(
            "xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=4
        ),
        images(),
        feed_forward=3,
        heads=3,
        channels=2,
        notes=3,
    ),
    # Closed units stay: attention reshapes by the width of its input.
    "volo": Architecture(
        timm(
            "volo.VOLO",
            (1, 1, 1, 1),
            32,
            embed_dims=(32, 32, 32, 32),
            num_heads=(2, 2, 2, 2),
            mlp_ratio=2.0,
            stem_hidden_dim=16,
        ),
        images(),
        feed_forward=6,
        heads=6,
        channels=3,
        notes=4,
    ),
    "convmixer": Architecture(
        timm("convmixer.ConvMixer", 16, 2, 3, 4), images(), feed_forward=1, channels=2
    ),
    "hiera": Architecture(
        timm_model(
            "hiera_tiny_224", img_size=(32, 32), embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)
        ),
        images(),
        feed_forward=4,
        heads=3,
    ),
}

SEEING_AND_HEARING = {
    "hf_vit": Architecture(
        hugging_face("ViTForImageClassification", **VISION),
        pixels(),
        feed_forward=2,
        heads=2,
        resumes=True,
    ),
    # Closed units stay: a table of the bias by position has a column for each head.
    "hf_swin": Architecture(
        hugging_face("SwinForImageClassification", **HF_SWIN),
        pixels(),
        feed_forward=3,
        heads=3,
        notes=3,
        uncounted=True,
    ),
    # Closed units stay: a net makes the bias by position of each head.
    "hf_swin_v2": Architecture(
        hugging_face("Swinv2ForImageClassification", **HF_SWIN),
        pixels(),
        feed_forward=6,
        heads=3,
        notes=3,
    ),
    "dinov2": Architecture(
        hugging_face("Dinov2ForImageClassification", **VISION), pixels(), feed_forward=2, heads=2
    ),
    "clip": Architecture(
        hugging_face("CLIPModel", projection_dim=16, **BOTH), captioned, feed_forward=4, heads=4
    ),
    "siglip": Architecture(hugging_face("SiglipModel", **BOTH), captioned, feed_forward=5, heads=4),
    "segformer": Architecture(
        hugging_face(
            "SegformerForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
        ),
        pixels(),
        feed_forward=1,
        heads=2,
        channels=2,
    ),
    "wav2vec2": Architecture(
        hugging_face("Wav2Vec2ForCTC", **SOUND),
        waves,
        feed_forward=2,
        heads=2,
        channels=1,
        uncounted=True,
    ),
    "hubert": Architecture(
        hugging_face("HubertForCTC", **SOUND),
        waves,
        feed_forward=2,
        heads=2,
        channels=1,
        uncounted=True,
    ),
    "whisper": Architecture(
        hugging_face(
            "WhisperForConditionalGeneration",
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
            **ENCODER_DECODER,
        ),
        speech,
        feed_forward=2,
        heads=3,
        channels=1,
    ),
}

OTHERS = {
    "encoder": Architecture(encoder, noise(2, 5, 32), feed_forward=2, resumes=True),
    "mlp": Architecture(mlp, noise(4, 8), feed_forward=2, resumes=True),
    "grouped_attention": Architecture(GroupedAttention, noise(2, 5, 8), heads=1),
    "graph_by_pairs": Architecture(GraphNet, graph_by_pairs, feed_forward=1),
    # Nothing: the neighbours are an input of numbers, which reach every map.
    "graph_by_matrix": Architecture(GraphNet, graph_by_matrix),
}

ZOO = TORCHVISION | TIMM | LANGUAGE | SEEING_AND_HEARING | OTHERS
