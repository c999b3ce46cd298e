"""Refuses, from the config alone and before any weight is read, models that cannot run here; each with its reason."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from compspec.errors import UnsupportedError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_MULTIMODAL = ("vision_config", "audio_config", "speech_config")


def check_config(config: Any) -> None:
    """Checks what a config says about architecture.

    Raises:
        UnsupportedError: names the architecture and the reason.
    """
    reason = _refusal(config)
    if reason is not None:
        raise UnsupportedError(f"{architecture_name(config)} is not supported: {reason}")


def architecture_name(config: Any) -> str:
    """The class of the model, or its type where the config names no class."""
    names = getattr(config, "architectures", None)
    return names[0] if names else f"model type '{config.model_type}'"


def _refusal(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; compspec runs decoder-only ones"
    for name in _MULTIMODAL:
        if getattr(config, name, None) is not None:
            return f"it is multimodal ({name}); compspec runs text-only causal language models"
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return "it uses multi-head latent attention (kv_lora_rank), which the KV cache does not hold"
    if getattr(text, "use_bidirectional_attention", False):
        return "its attention is bidirectional (use_bidirectional_attention)"
    return _class_refusal(config) or _layer_refusal(text)


def _layer_refusal(text: Any) -> str | None:
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if others:
        return (
            f"its layers are not all full or sliding attention ({', '.join(others)}), which is all that compspec runs"
        )
    if getattr(text, "attention_chunk_size", None):
        return "its attention is chunked (attention_chunk_size)"
    return None


def _class_refusal(config: Any) -> str | None:
    """What the class that would be built says of itself; a class from remote code is judged by the self-check."""
    if getattr(config, "auto_map", None):
        return None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return "transformers has no causal language model of this type"
    if getattr(model_class, "_is_stateful", False):
        return "it has recurrent or hybrid layers, whose state can be neither paged nor rolled back"
    named = getattr(config, "architectures", None) or ()
    if named and not any(name.endswith(("ForCausalLM", "LMHeadModel", model_class.__name__)) for name in named):
        return f"its checkpoint holds no causal language model, which would be {model_class.__name__}"
    return None
