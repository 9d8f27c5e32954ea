# SPDX-License-Identifier: Apache-2.0
"""What a payload costs: the dicts around the tensors, and the whole with the tensors in it.

The first sections use batches so small that their bytes are nothing: what is left is the price
of a call. Competitors: the same payload built in plain Python with torch, row by row, as Python
adapters do it, and "dicts alone", the same dicts in Python over tensors that are there already.
The tensors of a small batch are also made apart ("tensors alone": our kernels, and torch's
slices for the views of mini-batches), so that the difference is a payload without its tensors.

The later sections use real sizes. The floor there is a copy of the tensors that have to be made
into fresh memory, by all threads; the mask and the prompts travel as they are.

The client's own methods are timed too: they read the config once and build the same payloads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F

import arctic_rl_c

SIZES = [(128, 512, 1024), (1024, 1024, 3072), (4096, 1024, 3072)]
ROLLOUTS = 8
PAD = 151643
CALLS = 500  # of a small payload, in one timed run
Variants = dict[str, Callable[[], object]]

ACTOR = SimpleNamespace(
    **{f"option_{i}": i * 0.5 for i in range(20)},
    use_kl_loss=True,
    calculate_entropy=False,
    rollout_n=ROLLOUTS,
    clip_ratio=0.2,
    clip_ratio_c=3.0,
    loss_agg_mode="token-mean",
    optim=SimpleNamespace(lr=1e-6),
    ppo_micro_batch_size_per_gpu=None,
    betas=(0.9, 0.999),
    policy_loss=SimpleNamespace(loss_mode="vanilla", clip_cov_ratio=0.0002),
)


# ---- inputs -------------------------------------------------------------------------------------


def config_of(version: str, rows: int, prompt_width: int, response_width: int) -> dict[str, Any]:
    """One rank; the nested generation with four mini-batches."""
    prompts = rows // ROLLOUTS
    backend: dict[str, Any] = {"training_gpus": 1, "sampling_gpus": 1, "log_prob_gpus": 1}
    if version == "seed":
        backend |= {"comm_protocol": "ray", "zero_optimization": {"stage": 2}}
    else:
        backend |= {"train": {"load_balancer": True}, "comms": {"protocol": "ray"}}
    return arctic_rl_c.normalize_config(
        {
            "remote_backend": backend,
            "actor_rollout_ref": {
                "model": {"path": "a/model"},
                "actor": {
                    "ppo_mini_batch_size": max(1, prompts // 4),
                    "ppo_micro_batch_size_per_gpu": 1,
                    "ppo_max_token_len_per_gpu": prompt_width + ROLLOUTS * response_width,
                },
                "rollout": {"n": ROLLOUTS},
            },
            "data": {
                "train_batch_size": prompts,
                "max_prompt_length": prompt_width,
                "max_response_length": response_width,
            },
        }
    )


def batch_of(rows: int, prompt_width: int, response_width: int) -> dict[str, Any]:
    """Lengths uniform from an eighth of the width up; the rollouts of a prompt share it."""
    random = torch.Generator().manual_seed(rows)

    def lengths(count: int, width: int) -> torch.Tensor:
        return torch.randint(max(1, width // 8), width + 1, (count,), generator=random)

    prompts = lengths(rows // ROLLOUTS, prompt_width).repeat_interleave(ROLLOUTS)
    responses = lengths(rows, response_width)
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(prompts + responses, 0, out=offsets[1:])
    columns = torch.arange(prompt_width + response_width)
    first = (prompt_width - prompts)[:, None]
    last = (prompt_width + responses)[:, None]
    mask = ((columns >= first) & (columns < last)).to(torch.int64)
    values = torch.randint(1, 150000, (int(offsets[-1]),), generator=random)
    places = torch.cat([torch.arange(int(n)) for n in prompts + responses])
    response_mask = mask[:, prompt_width:].contiguous()
    floats = torch.rand(rows, response_width, generator=random)
    return {
        "input_ids": torch.nested.nested_tensor_from_jagged(values, offsets),
        "position_ids": torch.nested.nested_tensor_from_jagged(places, offsets),
        "attention_mask": mask,
        "prompts": torch.zeros(rows, prompt_width, dtype=torch.int64),
        "responses": torch.zeros(rows, response_width, dtype=torch.int64),
        "response_mask": response_mask,
        "loss_mask": response_mask,
        "old_log_probs": -floats,
        "advantages": floats,
        "ref_log_prob": -floats,
        "temperature": 0.7,
        "global_batch_size": rows,
    }


# ---- the same in plain Python -------------------------------------------------------------------


def pad_rows(nested: torch.Tensor, data: dict[str, Any], fill: int) -> torch.Tensor:
    values, offsets = nested.values(), nested.offsets()
    prompt_width, response_width = data["prompts"].shape[1], data["responses"].shape[1]
    mask = data["attention_mask"]
    prompts = mask[:, :prompt_width].sum(dim=1)
    responses = mask[:, prompt_width:].sum(dim=1)
    rows = []
    for i in range(mask.shape[0]):
        start, p, r = offsets[i].item(), prompts[i].item(), responses[i].item()
        prompt = F.pad(values[start : start + p], (prompt_width - p, 0), value=fill)
        response = F.pad(values[start + p : start + p + r], (0, response_width - r), value=fill)
        rows.append(torch.cat([prompt, response]))
    return torch.stack(rows)


def left_pad(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(tensor, (width - tensor.shape[1], 0))


def plain_config(value: Any) -> Any:
    return json.loads(json.dumps(vars(value), default=lambda odd: None))


def meta_of(config: dict[str, Any], data: dict[str, Any], entropy: bool) -> dict[str, Any]:
    train = config["remote_backend"]["train"]
    return {
        "zorro_train_enable": train["zorro_train"]["enable"],
        "zorro_train_max_rollouts": train["zorro_train"]["max_rollouts"],
        "load_balancer": train["load_balancer"],
        "rollout_n": ROLLOUTS,
        "max_prompt_len": data["prompts"].shape[1],
        "max_response_len": data["responses"].shape[1],
        "max_token_len_per_gpu": config["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"],
        "temperature": data["temperature"],
        "calculate_entropy": entropy,
        "pad_token_id": PAD,
        "drop_position_ids": config["remote_backend"]["comms"]["drop_position_ids"],
        "logits_optimization": train["logits"]["optimization"],
        "logits_optimization_peak_mem_size_in_gib": train["logits"][
            "optimization_peak_mem_size_in_gib"
        ],
        "logits_compute_in_fp32": train["logits"]["compute_in_fp32"],
    }


def python_log_prob(data: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {
        "batch": {
            "input_ids": pad_rows(data["input_ids"], data, PAD),
            "attention_mask": data["attention_mask"],
            "prompts": data["prompts"],
        },
        "meta": meta_of(config, data, True),
        "processing": {"post": ["compute_entropy_and_logprobs"], "loss_fn": None},
    }


def python_update(data: dict[str, Any], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Each mini-batch padded by itself, as the recorded adapter did in every epoch."""
    actor = config["actor_rollout_ref"]["actor"]
    count = config["data"]["train_batch_size"] // actor["ppo_mini_batch_size"]
    rows = data["attention_mask"].shape[0] // count
    offsets = data["input_ids"].offsets()
    payloads = []
    for i in range(count):
        begin, end = i * rows, (i + 1) * rows
        part = {
            key: value[begin:end]
            for key, value in data.items()
            if isinstance(value, torch.Tensor) and not value.is_nested
        }
        ids = data["input_ids"].values()[offsets[begin] : offsets[end]]
        part["input_ids"] = torch.nested.nested_tensor_from_jagged(
            ids, offsets[begin : end + 1] - offsets[begin]
        )
        width = part["attention_mask"].shape[1]
        batch = {
            "input_ids": pad_rows(part["input_ids"], part, PAD),
            "attention_mask": part["attention_mask"],
            "prompts": part["prompts"],
            "responses": part["responses"],
            "response_mask": left_pad(part["response_mask"], width),
            "old_log_probs": left_pad(part["old_log_probs"], width),
            "advantages": left_pad(part["advantages"], width),
            "ref_log_prob": left_pad(part["ref_log_prob"], width),
        }
        batch["loss_mask"] = batch["response_mask"]
        meta = meta_of(config, data, False) | {
            "actor_config": plain_config(ACTOR),
            "policy_loss_config": plain_config(ACTOR.policy_loss),
            "global_batch_size": actor["ppo_mini_batch_size"] * ROLLOUTS,
            "batch_num_tokens": part["response_mask"].sum(),
            "rollout_is_weights": None,
        }
        processing = {
            "post": ["apply_temperature", "compute_entropy_and_logprobs"],
            "loss_fn": "verl_grpo",
        }
        payloads.append({"batch": batch, "meta": meta, "processing": processing})
    return payloads


# ---- ours ---------------------------------------------------------------------------------------


class Nowhere:
    """A transport that is never called: building is what is timed."""

    name = "nowhere"
    accepts_token_ids = accepts_routing_key = accepts_strict = True


def ours_log_prob(data: dict[str, Any], config: dict[str, Any]) -> object:
    return arctic_rl_c.build_log_prob_payload(
        data, config, pad_token_id=PAD, rollout_n=ROLLOUTS, calculate_entropy=True
    )


def ours_update(data: dict[str, Any], config: dict[str, Any]) -> object:
    return arctic_rl_c.build_update_payloads(
        data, config, actor_config=ACTOR, pad_token_id=PAD, rollout_n=ROLLOUTS
    )


def tensors_log_prob(data: dict[str, Any]) -> Any:
    return arctic_rl_c.pad_prompt_response(
        data["input_ids"],
        data["prompts"],
        data["responses"],
        data["attention_mask"],
        pad_value=PAD,
    )


LEFT_PADDED = ("response_mask", "old_log_probs", "advantages", "ref_log_prob")


def tensors_update(data: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor of the mini-batches: padded once, then cut into views by torch."""
    ids, _, _ = tensors_log_prob(data)
    width = ids.shape[1]
    whole = [ids, *(arctic_rl_c.left_pad(data[key], width) for key in LEFT_PADDED)]
    whole += [data[key] for key in ("attention_mask", "prompts", "responses")]
    rows = len(ids) // 4
    return [tensor[i : i + rows] for i in range(0, len(ids), rows) for tensor in whole]


def dicts_alone(build: Any, data: dict[str, Any], config: dict[str, Any]) -> Callable[[], object]:
    """The Python builder's dicts over one built payload's tensors; configs through JSON."""
    built = build(data, config)
    payloads = built if isinstance(built, list) else [built]
    update = isinstance(built, list)

    def run() -> list[dict[str, Any]]:
        found = []
        for payload in payloads:
            batch = {key: payload["batch"][key] for key in payload["batch"]}
            meta = meta_of(config, data, not update)
            if update:
                meta["actor_config"] = plain_config(ACTOR)
                meta["policy_loss_config"] = plain_config(ACTOR.policy_loss)
                for key in ("global_batch_size", "batch_num_tokens", "rollout_is_weights"):
                    meta[key] = payload["meta"][key]
            processing = {"post": list(payload["processing"]["post"]), "loss_fn": None}
            found.append({"batch": batch, "meta": meta, "processing": processing})
        return found

    return run


# ---- sections -----------------------------------------------------------------------------------


def agree(one: Any, other: Any) -> None:
    """The competitor builds what we build, or the comparison means nothing."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other), (list(one), list(other))
        for key in one:
            agree(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            agree(a, b)
    else:
        assert one == other, (one, other)


def small_section(
    title: str, variants: Variants, payloads: int, args: argparse.Namespace
) -> common.Section:
    count = CALLS if not args.quick else CALLS // 10
    timed = common.compare(
        {name: common.repeated(function, count) for name, function in variants.items()}, args
    )
    results = common.per_call(timed, count)
    found = common.Section(title, results, baseline="ours, client")
    # What a neighbour on the machine costs is in the median, less so in the quickest tenth.
    quick = {result.name: result.percentile(0.1) for result in results}
    apart = quick["ours, client"] - quick["ours, tensors alone"]
    found.facts["payloads a call"] = payloads
    found.facts["python / ours (p10)"] = f"{quick['python'] / quick['ours, client']:.1f}"
    found.facts["a payload apart from its tensors (p10)"] = common.duration(
        max(apart, 0) / payloads
    )
    return found


def small_sections(args: argparse.Namespace) -> list[common.Section]:
    rows, prompt_width, response_width = 32, 4, 4
    data = batch_of(rows, prompt_width, response_width)
    config = config_of("final", rows, prompt_width, response_width)
    client = arctic_rl_c.ArcticRLClient(Nowhere(), config)
    agree(ours_log_prob(data, config), python_log_prob(data, config))
    agree(ours_update(data, config), python_update(data, config))
    one: Variants = {
        "ours, client": lambda: client.compute_log_prob(
            data, pad_token_id=PAD, rollout_n=ROLLOUTS, calculate_entropy=True
        ),
        "ours, builder": lambda: ours_log_prob(data, config),
        "ours, tensors alone": lambda: tensors_log_prob(data),
        "python": lambda: python_log_prob(data, config),
        "python, dicts alone": dicts_alone(python_log_prob, data, config),
    }
    many: Variants = {
        "ours, client": lambda: client.update_actor(
            data, actor_config=ACTOR, pad_token_id=PAD, rollout_n=ROLLOUTS
        ),
        "ours, builder": lambda: ours_update(data, config),
        "ours, tensors alone": lambda: tensors_update(data),
        "python": lambda: python_update(data, config),
        "python, dicts alone": dicts_alone(python_update, data, config),
    }
    shape = f"{rows} x ({prompt_width} + {response_width})"
    return [
        small_section(f"log-prob payload, {shape}", one, 1, args),
        small_section(f"update payloads, {shape}, 4 mini-batches", many, 4, args),
    ]


def fresh_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """NumPy advises huge pages for new memory, torch does not; ours is NumPy's."""
    return [
        torch.from_numpy(np.empty(tensor.shape, tensor.numpy().dtype)).copy_(tensor)
        for tensor in tensors
    ]


def size_sections(size: tuple[int, int, int], args: argparse.Namespace) -> list[common.Section]:
    rows, prompt_width, response_width = size
    data = batch_of(*size)
    config = config_of("final", *size)
    client = arctic_rl_c.ArcticRLClient(Nowhere(), config)
    sections = []
    for name, ours, python, call in (
        (
            "log-prob payload",
            ours_log_prob,
            python_log_prob,
            lambda: client.compute_log_prob(data, pad_token_id=PAD, rollout_n=ROLLOUTS),
        ),
        (
            "update payloads, 4 mini-batches",
            ours_update,
            python_update,
            lambda: client.update_actor(
                data, actor_config=ACTOR, pad_token_id=PAD, rollout_n=ROLLOUTS
            ),
        ),
    ):
        made = [tensors_log_prob(data)[0]]
        if ours is ours_update:
            made += [arctic_rl_c.left_pad(data[key], made[0].shape[1]) for key in LEFT_PADDED]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in made)
        variants: Variants = {
            "ours": call,
            "python": lambda python=python: python(data, config),
            "copy to fresh, all threads": lambda made=made: fresh_copies(made),
        }
        results = common.compare(variants, args, nbytes=nbytes)
        medians = {result.name: result.median for result in results}
        title = f"{name}, {rows} x ({prompt_width} + {response_width}), {nbytes / 1e6:.0f} MB"
        section = common.Section(title, results, baseline="ours")
        section.facts["python / ours"] = f"{medians['python'] / medians['ours']:.1f}"
        floor = medians["copy to fresh, all threads"]
        section.facts["ours / a copy of the tensors"] = f"{medians['ours'] / floor:.2f}"
        sections.append(section)
    return sections


def main() -> None:
    args = common.parser(__doc__).parse_args()
    sections = small_sections(args)
    for size in SIZES[:1] if args.quick else SIZES:
        sections += size_sections(size, args)
    common.report(Path(__file__).stem.removeprefix("bench_"), sections, args)


if __name__ == "__main__":
    main()
