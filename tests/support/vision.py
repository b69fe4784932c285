"""Random vision-language models of two layers with processors built here, and small images.

Image processors are those on PIL: torchvision is no requirement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    Qwen2VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.models import _COMMON, FAMILIES
from tests.support.tokenizers import make_tokenizer

VISION_FAMILIES = ("llava", "llava_next", "qwen2_vl", "idefics3", "gemma3")
_ADDED = [
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"),
    *("<row_2_col_1>", "<row_2_col_2>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
]
_VOCABULARY = 352
_PINPOINTS = [[8, 16], [16, 8], [16, 16]]
_TEXT = {**_COMMON, "vocab_size": _VOCABULARY}
_TOWER = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.25}
_PLACEHOLDERS = {
    "llava": "<image>",
    "llava_next": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
}
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- for block in message['content'] -%}
{%- if block['type'] == 'image' %}{{ 'PLACEHOLDER' }}{% else %}{{ block['text'] }}{% endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


class _WithoutVideos(Qwen2VLProcessor):
    """The processor of videos needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def tiny_processor(family: str):
    """A processor of images of a few pixels, with a tokenizer of its own."""
    tokenizer = make_tokenizer("plain")
    tokenizer.add_special_tokens({"additional_special_tokens": _ADDED}, replace_extra_special_tokens=False)
    template = _TEMPLATE.replace("PLACEHOLDER", _PLACEHOLDERS[family])
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        kinds: dict[str, Any] = {"patch_size": 4, "vision_feature_select_strategy": "default"}
        return LlavaProcessor(images, tokenizer, **kinds, num_additional_image_tokens=1, chat_template=template)
    if family == "llava_next":
        images = LlavaNextImageProcessorPil(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_grid_pinpoints=_PINPOINTS
        )
        kinds = {"patch_size": 4, "vision_feature_select_strategy": "default"}
        return LlavaNextProcessor(images, tokenizer, **kinds, num_additional_image_tokens=1, chat_template=template)
    if family == "gemma3":
        names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        for name, content in names.items():
            setattr(tokenizer, name, content)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(content))
        images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8}, do_pan_and_scan=False)
        return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    if family == "qwen2_vl":
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=512)
        return _WithoutVideos(images, tokenizer, None, chat_template=template)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
    return Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)


def tiny_vlm(family: str = "llava", *, seed: int = 0):
    """A fresh random model in eval mode and its processor; the global random state stays as it was."""
    processor = tiny_processor(family)
    token = processor.tokenizer.convert_tokens_to_ids
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(_config(family, token))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():  # Gemma's projector starts at 0: images would not matter
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval(), processor


def _config(family: str, token: Any):
    fields: dict[str, Any]
    if family in ("llava", "llava_next"):
        tower = {**_TOWER, "model_type": "clip_vision_model", "hidden_size": 24, "image_size": 8, "patch_size": 4}
        text = {**_TEXT, "model_type": "llama"}
        fields = {"image_token_index": token("<image>"), "image_seq_length": 4}
        fields |= {"image_grid_pinpoints": _PINPOINTS} if family == "llava_next" else {}
    elif family == "gemma3":
        tower = {**_TOWER, "model_type": "siglip_vision_model", "hidden_size": 24, "image_size": 8, "patch_size": 4}
        text = {**_TEXT, **FAMILIES["gemma3"]}
        fields = {"mm_tokens_per_image": 4, "image_token_index": token("<image_soft_token>")}
        fields |= {"boi_token_index": token("<start_of_image>"), "eoi_token_index": token("<end_of_image>")}
    elif family == "qwen2_vl":
        tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.25}
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
        text = {**_TEXT, "rope_parameters": rope}
        fields = {"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")}
        fields |= {"vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>")}
    else:
        tower = {**_TOWER, "hidden_size": 24, "image_size": 8, "patch_size": 4}
        text = {**_TEXT, "model_type": "llama"}
        fields = {"image_token_id": token("<image>"), "scale_factor": 2, "pad_token_id": 0}
    return AutoConfig.for_model(family, vision_config=tower, text_config=text, tie_word_embeddings=False, **fields)


def picture(seed: int, width: int = 12, height: int = 8) -> Image.Image:
    """An image of noise, of its own for every seed."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
