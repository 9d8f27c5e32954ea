# SPDX-License-Identifier: Apache-2.0
"""Registration with each form of verl, and what a user reads when it cannot be."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - the processes started here import it

from arctic_rl_c import load_config
from verl_doubles import DOUBLE, PLUGIN, forget, verl


@pytest.mark.parametrize("form", ["plugin", "v1"])
def test_everything_is_registered_and_nothing_heavy_is_loaded(form: str) -> None:
    with verl(form):
        plugin = importlib.import_module(PLUGIN)
        registry = importlib.import_module("verl.remote_backend.base").RemoteBackendRegistry
        replicas = importlib.import_module("verl.workers.rollout.replica").RolloutReplicaRegistry
        assert plugin.registration.form == form and plugin.registration.name == "arctic"
        base = importlib.import_module("verl.remote_backend.base").RemoteBackend
        assert issubclass(registry.get("arctic"), base)
        for late in ("worker", "rollout"):
            assert f"{PLUGIN}.{late}" not in sys.modules
        assert registry.get_worker("arctic").__name__ == "ArcticWorker"
        assert replicas.get("arctic").__name__ == "ArcticReplica"
        # A second time, as in a process where the worker module does it again.
        again = importlib.import_module(f"{PLUGIN}.register").register()
        assert again == plugin.registration


def test_the_registration_says_which_form_it_met() -> None:
    texts = {}
    for form in ("seed", "plugin", "v1"):
        with verl(form):
            texts[form] = str(importlib.import_module(PLUGIN).registration)
    assert texts["seed"].startswith("registered as 'arctic' with verl 0.0-seed (first form")
    assert "V1 trainer" in texts["v1"] and "V1" not in texts["plugin"]


def test_the_first_form_finds_the_worker_where_it_looks() -> None:
    with verl("seed") as package:
        workers = sys.modules["verl.remote_backend.workers.arctic_rl"]
        adapter = sys.modules["verl.workers.remote_client.arctic_rl"]
        assert workers.ArcticRLActorRolloutRefWorker.__name__ == "ArcticWorker"
        registry = importlib.import_module("verl.remote_backend.base").RemoteBackendRegistry
        assert adapter.ArcticRLClientWrapper is registry.get("arctic")
        with pytest.raises(AttributeError, match="no attribute 'Other'"):
            workers.Other  # noqa: B018
        assert package.__version__ == "0.0-seed"


def test_a_taken_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.syspath_prepend(DOUBLE)
    monkeypatch.setenv("VERL_DOUBLE_FORM", "plugin")
    try:
        base = importlib.import_module("verl.remote_backend.base")
        other = base.RemoteBackendRegistry.register("arctic")(type("Other", (), {}))
        registration = importlib.import_module(PLUGIN).registration
        assert registration.name == "arctic_c"
        assert base.RemoteBackendRegistry.get("arctic") is other
        assert base.RemoteBackendRegistry.get_worker("arctic") is None
        assert base.RemoteBackendRegistry.get_worker("arctic_c").__name__ == "ArcticWorker"
        base.RemoteBackendRegistry.backends["arctic_c"] = other
        with pytest.raises(ImportError, match="both names of the Arctic backend are taken"):
            importlib.import_module(f"{PLUGIN}.register").register()
    finally:
        forget()


def test_a_verl_without_a_remote_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("__version__ = '0.7.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ImportError, match=r"the one installed has none: install verl from"):
            importlib.import_module(PLUGIN)
    finally:
        forget()


def test_no_verl_at_all() -> None:
    # -I: without the folder of this test, which has the double.
    code = f"""
import sys
sys.meta_path.insert(0, type("No", (), {{"find_spec": staticmethod(
    lambda name, *_: (_ for _ in ()).throw(ModuleNotFoundError(name, name=name))
    if name == "verl" else None)}}))
import {PLUGIN}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "no verl is installed: install verl from its pull request 6422" in done.stderr


def test_an_import_that_fails_inside_verl_is_not_taken_for_a_missing_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    folder = tmp_path / "verl" / "remote_backend"
    folder.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text("import a_package_that_verl_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ModuleNotFoundError, match="a_package_that_verl_needs"):
            importlib.import_module(PLUGIN)
    finally:
        forget()


def test_the_group_file_is_in_the_package_and_holds_every_key() -> None:
    from omegaconf import OmegaConf

    path = Path(importlib.import_module("arctic_rl_c").__file__).parent
    path = path / "integrations" / "verl" / "config" / "remote_backend" / "arctic.yaml"
    with verl("plugin"):
        compat = importlib.import_module(f"{PLUGIN}.compat")
        user = {"actor_rollout_ref": {"rollout": {"n": 4}}, "remote_backend": OmegaConf.load(path)}
        config, reach = compat.plain_config(OmegaConf.create(user))
        assert reach == compat.Reach(url=None, transport=None)
        # The file says what the defaults are.
        plain = load_config(
            text="remote_backend: {train: {}}\nactor_rollout_ref: {rollout: {n: 4}}"
        )
        assert config["remote_backend"] == plain["remote_backend"]


def test_hydra_finds_the_group_through_the_search_path(tmp_path: Path) -> None:
    import hydra

    (tmp_path / "main.yaml").write_text(
        "defaults:\n  - optional remote_backend@remote_backend: null\n  - _self_\n"
        "actor_rollout_ref: {rollout: {n: 3}}\n"
    )
    with verl("plugin"), hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose(
            "main",
            overrides=[
                f"hydra.searchpath=[pkg://{PLUGIN}.config]",
                "remote_backend=arctic",
                "remote_backend.train.zorro_train.enable=True",
                "remote_backend.comms.timeout=inf",
                "remote_backend.comms.timeouts={fwd_bwd: 7200}",
            ],
        )
        compat = importlib.import_module(f"{PLUGIN}.compat")
        _, reach = compat.plain_config(config)
    assert config.remote_backend.train.zorro_train.max_rollouts == 3
    assert config.remote_backend.train.zorro_train.enable is True
    assert reach.limits == {"timeout": math.inf, "timeouts": {"fwd_bwd": 7200.0}}
