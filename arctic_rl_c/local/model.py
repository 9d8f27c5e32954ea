# SPDX-License-Identifier: Apache-2.0
"""The causal LM of the embedded server: a random preset or a local directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from arctic_rl_c.local.options import SHAPES, ModelOptions

#: One token a character. The first three are special.
VOCABULARY = ("<pad>", "<bos>", "<eos>", *"0123456789+-*=, ?")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The presets' tokenizer: one token a character of arithmetic, made without a download."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="?",
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def load_tokenizer(options: ModelOptions) -> Any:
    """The tokenizer that belongs to a model."""
    if options.path is None:
        return build_tokenizer()
    _check_directory(options.path)
    return AutoTokenizer.from_pretrained(
        options.path, local_files_only=True, trust_remote_code=options.trust_remote_code
    )


def resolve_dtype(options: ModelOptions) -> torch.dtype:
    """The torch dtype of the weights."""
    name = options.dtype
    if name is None:
        name = "float32" if torch.device(options.device).type == "cpu" else "bfloat16"
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def build_model(options: ModelOptions, *, seed: int | None = None) -> Any:
    """Load a model, or initialise a preset at random.

    Args:
        options: Which one, and where.
        seed: Initialise at random with this seed, whatever `options` says.

    Returns:
        A transformers causal LM in eval mode on the wanted device. Its gradients are off.

    Raises:
        ValueError: Unknown shape or dtype, or a path that is not a model directory.
    """
    options.check()
    device, dtype = torch.device(options.device), resolve_dtype(options)
    if options.path is not None:
        _check_directory(options.path)
    if options.path is not None and seed is None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.path,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            local_files_only=True,
            trust_remote_code=options.trust_remote_code,
        )
        return _finish(model.to(device))
    # A generator of our own would not reach the model's initialisers: fork the global one.
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(options.seed if seed is None else seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(options.seed if seed is None else seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config(options), dtype=dtype, attn_implementation=options.attn_implementation
        )
    return _finish(model)


def _check_directory(path: str) -> None:
    """Before transformers takes a path that is not there for a name to download."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"model path {path!r} holds no config.json: give a local model directory (nothing "
            f"is downloaded) or one of the shapes {', '.join(SHAPES)}"
        )


def model_config(options: ModelOptions) -> Any:
    """The transformers config of a model."""
    if options.path is not None:
        return AutoConfig.from_pretrained(
            options.path, local_files_only=True, trust_remote_code=options.trust_remote_code
        )
    values = {"vocab_size": len(VOCABULARY), **SHAPES[options.shape]}
    return Qwen3Config(
        **values,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index("<pad>"),
        bos_token_id=VOCABULARY.index("<bos>"),
        eos_token_id=VOCABULARY.index("<eos>"),
    )


def _finish(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def write_model(path: str | Path, options: ModelOptions) -> Path:
    """Write a random preset with its tokenizer as a Hugging Face directory.

    Args:
        path: The directory, made when missing.
        options: Shape, seed and dtype.

    Returns:
        The directory.
    """
    directory = Path(path)
    build_model(options).save_pretrained(directory)
    load_tokenizer(options).save_pretrained(directory)
    return directory


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a weight sync carries: named parameters, a tied one once."""
    return [(name, param.detach()) for name, param in model.named_parameters()]


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence, by the model's generation config and the tokenizer."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(v) for v in value)
    return frozenset(ids)


def raw_chunks(tensor: torch.Tensor, limit: int = 1 << 26) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, `limit` bytes at a time."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), limit):
        yield flat[begin : begin + limit].cpu().numpy().data


def weights_digest(model: Any) -> str:
    """SHA-256 over names, dtypes, shapes and raw bytes of all weights, as hex."""
    digest = hashlib.sha256()
    for name, tensor in named_weights(model):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        for chunk in raw_chunks(tensor):
            digest.update(chunk)
    return digest.hexdigest()


def describe_model(model: Any) -> dict[str, Any]:
    """Plain facts about a model, for reports."""
    weights = named_weights(model)
    return {
        "architecture": type(model).__name__,
        "device": str(weights[0][1].device),
        "dtype": str(weights[0][1].dtype).removeprefix("torch."),
        "tensors": len(weights),
        "parameters": sum(t.numel() for _, t in weights),
        "bytes": sum(t.numel() * t.element_size() for _, t in weights),
        "vocab_size": int(model.config.vocab_size),
    }


def forward_flops(model: Any) -> dict[str, float]:
    """Floating-point operations of a forward pass, by what they grow with.

    Returns:
        `body`: of one token in the layers, two for each weight of a matrix; `head`: of one
        token whose logits are wanted; `attention`: of one token for each position it sees,
        four for each channel. Norms and the embedding look-up are left out.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    head = model.get_output_embeddings().weight
    outside = {id(head), id(model.get_input_embeddings().weight)}
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in outside)
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim
    return {"body": 2.0 * body, "head": 2.0 * head.numel(), "attention": 4.0 * channels}
