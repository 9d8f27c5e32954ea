# SPDX-License-Identifier: Apache-2.0
"""The jobs of an Arctic server: what each is created from, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arctic_rl_c.client_config import build_client_config

#: The order of creation; the reverse of the order in which they end.
JOB_TYPES = ("sampling", "log_prob", "training")


def initialize_payloads(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The bodies of `/initialize`, by job type, in the order of creation.

    Args:
        config: A main config, in any form that `normalize_config` takes. Also from the flat
            form jobs of a server of the final generation are made: no other is trained over
            HTTP (see `docs/transports.md`).

    Raises:
        ConfigError: The config is wrong, or lacks what a job needs.
    """
    client = build_client_config(config, generation="final")
    training, sampling = client["training"], client["sampling"]
    vllm = {"max_model_len": client["max_seq_len"], **sampling["vllm"]}
    shared = {
        key: value
        for key, value in (
            ("ds_config", training["ds_config"]),
            ("ds_worker_config", training["ds_worker_config"]),
        )
        if value
    }
    jobs: dict[str, dict[str, Any]] = {
        "sampling": {"vllm_config": vllm},
        "log_prob": {
            "full_determinism": training["full_determinism"],
            **shared,
            "log_prob_config": sampling["log_prob_ds_config"],
        },
        "training": {
            "full_determinism": training["full_determinism"],
            **shared,
            "cuda_ipc": training["cuda_ipc"],
            "low_memory": training["low_memory"],
        },
    }
    if sampling["arctic_inference_config"]:
        jobs["sampling"]["arctic_inference_config"] = sampling["arctic_inference_config"]
    if training["checkpoint_path"] is not None:
        jobs["training"]["checkpoint_path"] = training["checkpoint_path"]
    head = {"model_name": client["model_name"]}
    if client["seed"] is not None:
        head["seed"] = client["seed"]
    return {
        job: {**head, "job_type": job, **jobs[job]}
        for job in JOB_TYPES
        if client[f"{job}_gpus"] > 0
    }
