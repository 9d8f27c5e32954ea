# SPDX-License-Identifier: Apache-2.0
"""DSSST1: encode and decode against a copy of the bytes, and against safetensors and json.

The payload is an update: seven tensors of [rows, 4096] int64 beside a dict of settings. `copy` is
NumPy's copy of the same bytes to fresh memory, which is the floor for both directions; `bytes()`
is the same copy by the interpreter, without huge pages. `safetensors + json` builds the same
frame, and takes it apart again, with these two libraries as a plain implementation would.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any

import common
import numpy as np
import safetensors
import safetensors.torch
import torch

from arctic_rl_c import wire

WIDTH = 4096
FIELDS = (
    "input_ids",
    "attention_mask",
    "prompts",
    "responses",
    "response_mask",
    "position_ids",
    "old_log_probs",
)
META = {
    "temperature": 0.7,
    "rollout_n": 8,
    "max_prompt_len": 1024,
    "max_response_len": 3072,
    "pad_token_id": 151643,
    "actor_config": {"loss_agg_mode": "token-mean", "use_kl_loss": False, "optim": None},
}


def payload(nbytes: int) -> dict[str, Any]:
    """An update payload of about `nbytes`."""
    rows = max(1, nbytes // (len(FIELDS) * WIDTH * 8))
    batch = {name: torch.arange(rows * WIDTH).reshape(rows, WIDTH) for name in FIELDS}
    return {"batch": batch, "meta": META, "processing": {"post": ["x"], "loss_fn": "verl_grpo"}}


def plain_encode(obj: dict[str, Any]) -> bytes:
    """The frame by safetensors and json."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: tuple[str, ...]) -> list[Any]:
        if isinstance(value, torch.Tensor):
            tensors[".".join(path)] = value
            return ["t", ".".join(path)]
        if path in ((), ("batch",)):
            return ["d", [[name, walk(item, (*path, name))] for name, item in value.items()]]
        return ["j", value]

    tree = json.dumps({"v": "DSSST1", "tree": walk(obj, ())})
    return safetensors.torch.save(tensors, {"dss": tree})


def plain_decode(frame: bytes) -> Any:
    """The object by safetensors and json."""
    length = int.from_bytes(frame[:8], "little")
    tree = json.loads(json.loads(frame[8 : 8 + length])["__metadata__"]["dss"])["tree"]
    tensors = safetensors.torch.load(frame)

    def build(node: list[Any]) -> Any:
        tag, value = node
        if tag == "t":
            return tensors[value]
        return {name: build(item) for name, item in value} if tag == "d" else value

    return build(tree)


def frame_sections(title: str, nbytes: int, args: Any) -> list[common.Section]:
    """Encode and decode of one payload."""
    obj = payload(nbytes)
    frame = wire.dumps(obj)
    assert frame == plain_encode(obj)
    source = np.frombuffer(frame, np.uint8)
    writable = bytearray(frame)
    view = memoryview(frame)[1:]  # bytes(bytes) would not copy
    encode: dict[str, Callable[[], object]] = {
        "copy": source.copy,
        "bytes()": lambda: bytes(view),
        "wire.dumps": lambda: wire.dumps(obj),
        "safetensors + json": lambda: plain_encode(obj),
    }
    decode: dict[str, Callable[[], object]] = {
        "copy": source.copy,
        "wire.loads": lambda: wire.loads(frame),
        "wire.loads(copy=False)": lambda: wire.loads(writable, copy=False),
        "safetensors + json": lambda: plain_decode(frame),
    }
    count = max(1, min(200, (8 << 20) // len(frame)))  # runs of about a millisecond at least
    sections = []
    for name, variants in (("encode", encode), ("decode", decode)):
        runs = {key: common.repeated(function, count) for key, function in variants.items()}
        moved = {key: 0 if "copy=False" in key else len(frame) for key in variants}
        results = common.per_call(common.compare(runs, args, nbytes=moved), count)
        sections.append(common.Section(f"{name}, {title}", results, baseline="copy"))
    return sections


def text_section(args: Any) -> common.Section:
    """A generate request: no tensors, all JSON."""
    obj = {"prompts": [list(range(1000, 2000)) for _ in range(64)], "sampling_params": {"n": 1}}
    frame, text = wire.dumps(obj), json.dumps(obj)
    variants: dict[str, Callable[[], object]] = {
        "json.dumps": lambda: json.dumps(obj),
        "wire.dumps": lambda: wire.dumps(obj),
        "json.loads": lambda: json.loads(text),
        "wire.loads": lambda: wire.loads(frame),
    }
    results = common.compare(variants, args, nbytes=len(frame))
    return common.Section("64 prompts of 1000 token ids", results, baseline="json.dumps")


def chunk_section(args: Any, nbytes: int) -> common.Section:
    """Byte chunks: one digest and one copy."""
    frame = wire.dumps(payload(nbytes))
    limit = len(frame) // 4
    chunks = wire.encode_byte_chunks(frame, limit, "request")
    source = np.frombuffer(frame, np.uint8)

    def digest_and_copy() -> object:
        return hashlib.sha256(frame).digest(), source.copy()

    variants: dict[str, Callable[[], object]] = {
        "sha256 and copy": digest_and_copy,
        "encode_byte_chunks": lambda: wire.encode_byte_chunks(frame, limit, "request"),
        "decode_byte_chunks": lambda: wire.decode_byte_chunks(chunks),
    }
    results = common.compare(variants, args, nbytes=len(frame))
    title = f"byte chunks, {len(frame) / 1e6:.0f} MB in {len(chunks)}"
    return common.Section(title, results, baseline="sha256 and copy")


def main() -> None:
    """Run all sections."""
    args = common.parser(__doc__).parse_args()
    sizes = {"1 MB": 1 << 20, "64 MB": 64 << 20, "1 GB": 1 << 30}
    if args.quick:
        del sizes["1 GB"]
    sections = []
    for title, nbytes in sizes.items():
        sections += frame_sections(title, nbytes, args)
        gc.collect()
    sections += [text_section(args), chunk_section(args, 64 << 20)]
    common.report("wire", sections, args)


if __name__ == "__main__":
    main()
