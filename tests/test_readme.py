# SPDX-License-Identifier: Apache-2.0
"""Code of the README and of the pages runs as it stands there; numbers are those of the results."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import arctic_rl_c
import csource

README = (csource.ROOT / "README.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(README)

#: Page and number of each block that needs no server and no second process, in one namespace.
PAGES = [
    ("config.md", 0),
    ("batch.md", 0),
    ("wire.md", 0),
    ("weight_sync.md", 1),
    ("weight_sync.md", 2),
]


class Tokenizer:
    pad_token_id = 9


class Engine(torch.nn.Linear):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def jagged(*rows: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n) for n in rows], layout=torch.jagged)


def test_weight_sync_example() -> None:
    torch.manual_seed(0)
    names = {"trainer": torch.nn.Linear(3, 2), "sampler": torch.nn.Linear(3, 2)}
    exec(BLOCKS[0], names)
    assert torch.equal(names["trainer"].weight, names["sampler"].weight)


def test_client_example(tmp_path: Path) -> None:
    script = tmp_path / "example.py"  # spawned processes import the main module again
    script.write_text(BLOCKS[1])
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "token_ids" in run.stdout


def test_the_pages_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "remote_backend: {weight_sync: {cuda_ipc: false}}\n"
        "actor_rollout_ref: {rollout: {n: 2, top_p: 0.9}}\n"
    )
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    trainer, model = torch.nn.Linear(3, 2), Engine(3, 2)
    sender = arctic_rl_c.WeightSender(trainer.named_parameters())
    receiver = arctic_rl_c.WeightReceiver(dict(model.named_parameters()))
    names: dict[str, object] = {
        "arctic_rl_c": arctic_rl_c,
        **{name: getattr(arctic_rl_c, name) for name in arctic_rl_c.__all__},
        "torch": torch,
        "tokenizer": Tokenizer,
        "data": {
            "input_ids": jagged(3, 5),
            "prompts": jagged(1, 3),
            "responses": jagged(2, 2),
            "attention_mask": mask,
        },
        "log_probs": torch.randn(2, 5),
        "model": model,
        "draft_model": torch.nn.Linear(1, 1),
        "receiver": receiver,
        "offer": sender.offer(),
        "rank": 0,
        "world_size": 1,
        "trainer_config": None,
    }
    for page, number in PAGES:
        text = (csource.ROOT / "docs" / page).read_text()
        names["ids"] = torch.arange(3)
        exec(BLOCK.findall(text)[number], names)
    sender.serve()
    sender.close()
    receiver.close()
    assert torch.equal(trainer.weight, model.weight)
    shown = capsys.readouterr().out
    assert "actor_rollout_ref.rollout.top_p=0.9: no effect" in shown
    assert "2 of 4 parameters are synced; not touched: drafter.bias, drafter.weight" in shown


def test_ratios_are_those_of_the_results() -> None:
    tool = csource.ROOT / "tools" / "readme_tables.py"
    run = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
