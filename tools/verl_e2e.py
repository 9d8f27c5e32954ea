# SPDX-License-Identifier: Apache-2.0
"""verl's own `main_ppo` through this library, on a CPU, with the step table that comes out.

Run it with the interpreter of an environment that has verl's needs and this package:

    python tools/verl_e2e.py CHECKOUT [--steps 4] [--keep FOLDER] [override ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: What verl imports on this way, by the name that pip knows; its own list has more.
NEEDS = {
    "accelerate": "accelerate",
    "arctic_rl_c": ".",
    "cachetools": "cachetools",
    "codetiming": "codetiming",
    "datasets": "datasets",
    "einops": "einops",
    "fastapi": "fastapi",
    "hydra": "hydra-core",
    "pandas": "pandas",
    "peft": "peft",
    "pyarrow": "pyarrow",
    "ray": "ray[default]",
    "tensorboard": "tensorboard",
    "tensordict": "tensordict==0.10.*",
    "torch": "torch",
    "torchdata": "torchdata",
    "transformers": "transformers",
    "uvicorn": "uvicorn",
}
NEEDS_OF_V1 = {"transfer_queue": "TransferQueue==0.1.11"}

ROOT = Path(__file__).resolve().parent.parent
REWARD = ROOT / "examples" / "verl_arithmetic.py"
PROMPTS, SAMPLES = 32, 8

#: Column, key in verl's console line, format.
COLUMNS = (
    ("actor/loss", ("actor/loss",), "{:.4f}"),
    ("grad_norm", ("actor/grad_norm",), "{:.4f}"),
    ("score", ("critic/score/mean",), "{:.3f}"),
    ("response", ("response_length/mean",), "{:.2f}"),
    ("gen (s)", ("timing_s/gen",), "{:.2f}"),
    ("old_log_prob (s)", ("timing_s/old_log_prob",), "{:.2f}"),
    ("update_actor (s)", ("timing_s/update_actor",), "{:.2f}"),
    ("update_weights (s)", ("timing_s/update_weights",), "{:.3f}"),
    ("step (s)", ("timing_s/step",), "{:.2f}"),
)


def form_of(checkout: Path) -> str:
    """The form of verl, by its files: seed, plugin or v1."""
    verl = checkout / "verl"
    if not (verl / "remote_backend").is_dir():
        sys.exit(f"{checkout} has no verl/remote_backend: see docs/verl.md for which verl to take")
    if (verl / "trainer" / "ppo" / "v1" / "trainer_remote_backend.py").is_file():
        return "v1"
    has_workers = "def register_worker" in (verl / "remote_backend" / "base.py").read_text()
    return "plugin" if has_workers else "seed"


def missing(form: str) -> list[str]:
    """What is to be installed before a run can start."""
    needs = NEEDS | (NEEDS_OF_V1 if form == "v1" else {})
    return [name for module, name in needs.items() if importlib.util.find_spec(module) is None]


def overrides(form: str, folder: Path, steps: int) -> list[str]:
    """What a user's command line would hold."""
    common = [
        "hydra.searchpath=[pkg://arctic_rl_c.integrations.verl.config]",
        f"hydra.run.dir={folder}/hydra",
        "remote_backend=arctic",
        "remote_backend.log_prob_gpus=0",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 4}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.optim.lr=4e-3",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.rollout.name=arctic",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={REWARD}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.logger=[console]",
        # A cluster of its own, also where another one runs on this machine.
        "+ray_kwargs.ray_init.address=local",
        # Many small processes on few cores: these are slots, not cores.
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]
    if form == "v1":
        # Each unit takes a slot; eight of them are the default.
        return [*common, "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]
    return [*common, "trainer.remote_backend=arctic", "trainer.use_legacy_worker_impl=disable"]


def run(checkout: Path, folder: Path, steps: int, extra: list[str]) -> list[dict[str, float]]:
    """Run main_ppo; each step's metrics."""
    form = form_of(checkout)
    if needs := missing(form):
        command = shlex.join([sys.executable, "-m", "pip", "install", *needs])
        sys.exit(f"{sys.executable} lacks {len(needs)} packages: {command}")
    subprocess.run([sys.executable, str(REWARD), str(folder)], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(folder / "stand_in")]),
        "VERL_USE_EXTERNAL_MODULES": "arctic_rl_c.integrations.verl",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [*overrides(form, folder, steps), *extra]
    log = folder / "log.txt"
    print(f"verl of the form {form!r}; the log is {log}", flush=True)
    rows = []
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if "arctic_rl_c: registered" in line:
                print(line[line.index("arctic_rl_c:") :].rstrip(), flush=True)
            if (found := metrics(line)) is not None:
                rows.append(found)
        code = process.wait()
    if code != 0:
        sys.stdout.write("".join(log.read_text().splitlines(keepends=True)[-60:]))
        sys.exit(f"main_ppo ended with code {code}")
    return rows


def metrics(line: str) -> dict[str, float] | None:
    """The metrics in a line of verl's console logger; None for other lines."""
    match = re.search(r"step:(\d+) - (.*)", line)
    if match is None:
        return None
    found = {"step": float(match[1])}
    for item in match[2].split(" - "):
        key, _, value = item.rpartition(":")
        value = re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip())
        try:
            found[key] = float(value)
        except ValueError:
            continue
    return found


def table(rows: list[dict[str, float]]) -> str:
    """The steps as a table."""
    head = ["step", *(name for name, _, _ in COLUMNS)]
    lines = []
    for row in rows:
        cells = [f"{int(row['step'])}"]
        for _, keys, form in COLUMNS:
            value = next((row[key] for key in keys if key in row), None)
            cells.append("-" if value is None else form.format(value))
        lines.append(cells)
    sizes = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(size) for cell, size in zip(line, sizes, strict=True))
        for line in [head, *lines]
    )


def main() -> None:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a verl checkout, see docs/verl.md")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="a folder for the model, the data and the log")
    options, extra = parser.parse_known_args()
    checkout = options.checkout.resolve()
    with tempfile.TemporaryDirectory(prefix="verl_e2e_") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        rows = run(checkout, folder, options.steps, extra)
    print(table(rows))
    steps = [int(row["step"]) for row in rows]
    if steps[-1:] != [options.steps] or any(not row.get("actor/grad_norm") for row in rows):
        sys.exit(f"wanted {options.steps} steps with a gradient each, found {steps}")


if __name__ == "__main__":
    main()
