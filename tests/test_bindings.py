# SPDX-License-Identifier: Apache-2.0
"""derive_bindings: a sync into an engine's layout equals what the engine's own loader makes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_rl_c import (
    Binding,
    Rules,
    WeightMismatchError,
    WeightReceiver,
    WeightSender,
    coverage,
    derive_bindings,
    expected_names,
)
from arctic_rl_c.bindings import NON_SYNCED
from engine import Linear, Ranks, Sizes, engine_model, load, trainer_weights
from peers import Peer

DENSE = Sizes()
MIXTURE = Sizes(experts=6)


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def assert_same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[name]), name


def pull(bindings: dict[str, object], *weights: dict[str, torch.Tensor], **options: object) -> None:
    """One sync after another into the same bindings."""
    for full in weights:
        with (
            WeightSender(full, verify="all") as sender,
            WeightReceiver(bindings, **options) as receiver,
        ):
            receiver.pull(sender.offer(), verify="all")
            assert not receiver.torn


def check(sizes: Sizes, ranks: Ranks, **options: object) -> None:
    """Two syncs with different values, each compared with the engine's own loader."""
    model = engine_model(sizes, ranks)
    bindings = derive_bindings(model, **options)
    before = addresses(model)
    receiver = WeightReceiver(bindings)
    for seed in (1, 2):
        full = trainer_weights(sizes, seed)
        with WeightSender(full, verify="all") as sender:
            receiver.pull(sender.offer(), verify="all")
        assert_same(model, load(engine_model(sizes, ranks), full))
    assert addresses(model) == before
    assert coverage(bindings, model).untouched == padding(model)


def padding(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of what a rank has nothing of but padding."""
    heads = {"model.embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del heads["lm_head"]
    rows = {name: vars(head.shard_indices).values() for name, head in heads.items()}
    return tuple(sorted(f"{name}.weight" for name, (start, end) in rows.items() if start == end))


# ---- a sync equals the engine's loader -----------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), *((r, 4) for r in range(4))])
def test_every_rank_gets_its_own(sizes: Sizes, rank: int, size: int, tied: bool) -> None:
    check(dataclasses.replace(sizes, tied=tied), Ranks(rank, size), tp_rank=rank, tp_size=size)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_may_be_shared_out_whole(rank: int) -> None:
    ranks = Ranks(rank, 2, expert_parallel=True)
    check(MIXTURE, ranks, tp_rank=rank, tp_size=2)


@st.composite
def _models(draw: st.DrawFn) -> tuple[Sizes, Ranks]:
    size = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = Sizes(
        layers=1,
        hidden=draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        heads=max(kv_heads, size) * draw(st.sampled_from([1, 2])),
        head=draw(st.integers(1, 3)),
        v_head=draw(st.integers(1, 3)),
        inner=size * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 40)),
        experts=draw(st.integers(0, 4)),
        expert_inner=size * draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        pad=draw(st.sampled_from([1, 4, 16])),
    )
    parallel = size > 1 and sizes.experts >= size and draw(st.booleans())
    return sizes, Ranks(draw(st.integers(0, size - 1)), size, parallel)


@settings(deadline=None, max_examples=60)
@given(_models())
def test_any_sizes(drawn: tuple[Sizes, Ranks]) -> None:
    sizes, ranks = drawn
    check(sizes, ranks, tp_rank=ranks.rank, tp_size=ranks.size)


TRAINER = """
import torch, engine
sender = arctic_rl_c.WeightSender(engine.trainer_weights(sizes, 1), receivers=2, verify="all")
"""
SAMPLER = """
import torch, engine
model = engine.engine_model(sizes, ranks)
before = {name: p.data_ptr() for name, p in model.named_parameters()}
bindings = arctic_rl_c.derive_bindings(model, tp_rank=ranks.rank, tp_size=ranks.size)
receiver = arctic_rl_c.WeightReceiver(bindings)
"""
EQUAL = """
reference = engine.load(engine.engine_model(sizes, ranks), engine.trainer_weights(sizes, 1))
found = dict(model.named_parameters())
equal = all(torch.equal(p, found[name]) for name, p in reference.named_parameters())
in_place = before == {name: p.data_ptr() for name, p in found.items()}
"""


def test_both_ranks_of_an_engine_pull_one_offer() -> None:
    with Peer() as trainer, Peer() as first, Peer() as second:
        samplers = {0: first, 1: second}
        for peer in (trainer, first, second):
            peer.run("import sys; sys.path.insert(0, tests)", tests=str(Path(__file__).parent))
        trainer.run(TRAINER, sizes=MIXTURE)
        for rank, sampler in samplers.items():
            sampler.run(SAMPLER, sizes=MIXTURE, ranks=Ranks(rank, 2))
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        for sampler in samplers.values():
            sampler.start("receiver.pull(offer, verify='all')", offer=offer)
        for sampler in samplers.values():
            assert sampler.answer().version == 1
            sampler.run(EQUAL)
            assert sampler.eval("(equal, in_place)") == (True, True)
        assert trainer.answer().version == 1


# ---- names ---------------------------------------------------------------------------------------


def test_expected_names_are_the_trainers() -> None:
    for sizes in (DENSE, MIXTURE, dataclasses.replace(DENSE, tied=True)):
        names = expected_names(engine_model(sizes))
        full = trainer_weights(sizes)
        if sizes.tied:
            assert "lm_head.weight" in derive_bindings(engine_model(sizes))
        assert names == sorted(full)
    assert "model.layers.0.self_attn.k_proj.bias" in names


def test_a_rank_expects_the_experts_that_others_hold() -> None:
    model = engine_model(MIXTURE, Ranks(1, 2, expert_parallel=True))
    assert expected_names(model, tp_rank=1, tp_size=2) == sorted(trainer_weights(MIXTURE))


def test_a_tied_head_is_filled_by_either_name() -> None:
    sizes = dataclasses.replace(DENSE, tied=True)
    model = engine_model(sizes)
    full = trainer_weights(sizes)
    renamed = dict(full)
    renamed["lm_head.weight"] = renamed.pop("model.embed_tokens.weight")
    pull(derive_bindings(model), full, renamed)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, load(engine_model(sizes), full))


def test_counts_of_a_tied_model_agree() -> None:
    """Its head is bound under both names, and the trainer sends one: no difference to report."""
    sizes = dataclasses.replace(DENSE, tied=True)
    model, lines = engine_model(sizes), []
    pull(derive_bindings(model), trainer_weights(sizes), log=lines.append)
    count = len(expected_names(model))
    assert lines == [
        f"[weight-sync names validated] context=host_shm sender={count} expected={count}"
    ]


def test_wrappers_of_adapters_leave_no_trace_in_names() -> None:
    model = engine_model(DENSE)
    attention = model.model.layers[0].self_attn
    wrapper = torch.nn.Module()
    wrapper.base_layer = attention.qkv_proj
    attention.qkv_proj = wrapper
    assert expected_names(model) == sorted(trainer_weights(DENSE))


def test_names_can_be_changed() -> None:
    model = engine_model(DENSE)
    rules = Rules(rename=lambda name: name.replace("model.layers.", "language_model.layers."))
    bindings = derive_bindings(model, rules=rules)
    full = {
        name.replace("model.layers.", "language_model.layers."): tensor
        for name, tensor in trainer_weights(DENSE).items()
    }
    pull(bindings, full)
    assert_same(model, load(engine_model(DENSE), trainer_weights(DENSE)))


def test_two_parameters_cannot_want_the_same_name() -> None:
    rules = Rules(rename=lambda name: name.replace("layers.1.", "layers.0."))
    with pytest.raises(ValueError, match=r"both model\.layers\.0\.\S+ and model\.layers\.1\.\S+"):
        derive_bindings(engine_model(DENSE), rules=rules)


def test_a_rule_of_ones_own_goes_first() -> None:
    model = engine_model(DENSE)
    model.model.sinks = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def custom(name: str, module: object, parameter: torch.Tensor) -> dict[str, object] | None:
        if name == "model.sinks":
            return {"all_sinks": Binding(parameter, 0, 2, 4)}
        return None

    full = trainer_weights(DENSE)
    pull(
        derive_bindings(model, rules=Rules(custom=custom)), {**full, "all_sinks": torch.arange(4.0)}
    )
    assert model.model.sinks.tolist() == [2, 3]


@pytest.mark.parametrize("part", NON_SYNCED)
def test_names_that_are_never_synced(part: str) -> None:
    model = engine_model(DENSE)
    module = model.model.layers[0]
    module.register_parameter(part[1:], torch.nn.Parameter(torch.ones(1), requires_grad=False))
    name = f"model.layers.0{part}"
    bindings = derive_bindings(model)
    assert name not in bindings
    assert coverage(bindings, model).untouched == (name,)
    pull(bindings, {**trainer_weights(DENSE), name: torch.zeros(3)})  # the receiver agrees
    assert getattr(module, part[1:]).item() == 1


# ---- other forms of trainer and engine -----------------------------------------------------------


@pytest.mark.parametrize("by", ["model", "rules"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_the_trainer_may_be_fused_too(rank: int, size: int, by: str) -> None:
    ranks = Ranks(rank, size)
    model = engine_model(DENSE, ranks)
    fused = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]}
    model.packed_modules_mapping = fused if by == "model" else {"qkv_proj": ["something"] * 3}
    rules = None if by == "model" else Rules(fused=fused)
    full = trainer_weights(DENSE)
    merged = dict(full)
    for layer in range(DENSE.layers):
        for stem, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            for kind in ("weight", "bias"):
                path = f"model.layers.{layer}.{stem.partition('.')[0]}"
                pieces = [merged.pop(f"{path}.{part}_proj.{kind}") for part in parts]
                merged[f"model.layers.{layer}.{stem}_proj.{kind}"] = torch.cat(pieces)
    pull(derive_bindings(model, tp_rank=rank, tp_size=size, rules=rules), merged)
    assert_same(model, load(engine_model(DENSE, ranks), full))


def stacked(full: dict[str, torch.Tensor], sizes: Sizes) -> dict[str, torch.Tensor]:
    found = dict(full)
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}.mlp.experts"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack(
                    [found.pop(f"{path}.{e}.{leaf}_proj.{kind}") for e in range(sizes.experts)]
                )
                for leaf in ("gate", "up", "down")
            )
            found[f"{path}.gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
            found[f"{path}.down_proj{suffix}"] = down
    return found


@pytest.mark.parametrize(
    "ranks", [Ranks(), Ranks(1, 2), Ranks(0, 2, expert_parallel=True), Ranks(3, 4)], ids=str
)
def test_the_trainer_may_stack_experts(ranks: Ranks) -> None:
    model = engine_model(MIXTURE, ranks)
    bindings = derive_bindings(
        model, tp_rank=ranks.rank, tp_size=ranks.size, rules=Rules(stacked_experts=True)
    )
    full = trainer_weights(MIXTURE)
    pull(bindings, stacked(full, MIXTURE))
    assert_same(model, load(engine_model(MIXTURE, ranks), full))


def test_stacked_experts_are_not_cut_twice() -> None:
    model = engine_model(MIXTURE, Ranks(0, 2, expert_parallel=True))
    for layer in model.model.layers:
        layer.mlp.experts.tp_size = 2
    with pytest.raises(ValueError, match=r"w13_weight is cut by experts and within them"):
        derive_bindings(model, tp_size=2, rules=Rules(stacked_experts=True))


@pytest.mark.parametrize("by", ["model", "rules"])
def test_experts_may_have_other_names(by: str) -> None:
    model = engine_model(MIXTURE)
    leaves = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    if by == "model":
        model.get_expert_mapping = lambda: [
            ("experts.w2_" if leaf == "w2" else "experts.w13_", f"experts.{e}.{leaf}.", e, leaf)
            for e in range(MIXTURE.experts)
            for leaf in leaves
        ]
    rules = None if by == "model" else Rules(experts=("w1", "w3", "w2"))
    full = trainer_weights(MIXTURE)
    named = {}
    for name, tensor in full.items():
        new = name
        for leaf, old in leaves.items():
            new = new.replace(f".{old}.", f".{leaf}.") if ".experts." in name else new
        named[new] = tensor
    pull(derive_bindings(model, rules=rules), named)
    assert_same(model, load(engine_model(MIXTURE), full))


def test_experts_without_a_gate() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 3, 5))
    model.experts.w2_weight = torch.nn.Parameter(torch.zeros(2, 5, 3))
    assert expected_names(model) == [
        f"experts.{expert}.{leaf}_proj.weight" for expert in (0, 1) for leaf in ("down", "up")
    ]


def test_experts_in_runs() -> None:
    model = engine_model(MIXTURE, Ranks(1, 2, expert_parallel=True))
    for layer in model.model.layers:
        layer.mlp.experts._expert_map = None
        layer.mlp.experts.ep_rank = 1
    full = trainer_weights(MIXTURE)
    pull(derive_bindings(model, tp_rank=1, tp_size=2), full)
    for expert in (3, 4, 5):
        found = model.model.layers[0].mlp.experts.w2_weight[expert - 3]
        assert torch.equal(found, full[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"])


@pytest.mark.parametrize("config", [{"vocab_size": 64}, SimpleNamespace(vocab_size=64)], ids=type)
@pytest.mark.parametrize("nested", [False, True])
def test_the_trainer_may_pad_its_vocabulary(config: object, nested: bool) -> None:
    model = engine_model(DENSE, Ranks(1, 2))
    full = trainer_weights(DENSE)
    padded = dict(full)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded[name] = torch.cat([full[name], torch.full((27, DENSE.hidden), 9.0)])
    source = {"vocab_size": None, "text_config": config} if nested else config
    pull(derive_bindings(model, tp_rank=1, tp_size=2, source_config=source), padded)
    assert_same(model, load(engine_model(DENSE, Ranks(1, 2)), full))


def test_layers_that_say_little() -> None:
    """Older engines keep the ranks elsewhere, and not all have every attribute."""
    ranks = Ranks(1, 2)
    model = engine_model(DENSE, ranks)
    for module in model.modules():
        for name in ("tp_rank", "tp_size", "total_num_heads", "total_num_kv_heads", "quant_method"):
            if hasattr(module, name):
                delattr(module, name)
        if hasattr(module, "num_heads"):
            module.head_dim = module.head_size
            del module.head_size, module.v_head_size, module.output_sizes
        elif hasattr(module, "output_sizes"):
            del module.output_sizes
        elif hasattr(module, "shard_indices"):
            del module.shard_indices
    config = {"num_key_value_heads": DENSE.kv_heads, "num_attention_heads": DENSE.heads}
    full = trainer_weights(DENSE)
    pull(derive_bindings(model, tp_rank=1, tp_size=2, source_config=config), full)
    assert_same(model, load(engine_model(DENSE, ranks), full))


# ---- quantised parameters ------------------------------------------------------------------------


class Fp8LinearMethod:
    pass


def quantise(model: torch.nn.Module) -> torch.nn.Module:
    """Each row of down_proj becomes fp8 with a scale, as after an engine has loaded it."""
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        store(down, down.weight.detach().clone())
        down.quant_method = Fp8LinearMethod()
    return model


def store(module: torch.nn.Module, weight: torch.Tensor) -> None:
    scale = weight.abs().amax(1, keepdim=True) / 448
    quantised = (weight / scale).to(torch.float8_e4m3fn)
    if module.weight.dtype == torch.float8_e4m3fn:
        module.weight.copy_(quantised)
        module.weight_scale.copy_(scale)
        return
    module.weight = torch.nn.Parameter(quantised, requires_grad=False)
    module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)


def test_quantised_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError) as caught:
        derive_bindings(quantise(engine_model(DENSE)))
    assert str(caught.value) == (
        "derive_bindings: 2 parameters are quantised, so that a copy of the trainer's would "
        "corrupt them: model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_proj.weight; "
        "give restore= to load them through tensors of the original form, or use views() with "
        "the engine's loader"
    )


@pytest.mark.parametrize("sign", ["method", "dtype", "scale", "modular"])
def test_any_sign_of_quantisation_will_do(sign: str) -> None:
    model = engine_model(DENSE)
    down = model.model.layers[0].mlp.down_proj
    if sign == "method":
        down.quant_method = Fp8LinearMethod()
    elif sign == "modular":
        down.quant_method = SimpleNamespace(old_quant_method=Fp8LinearMethod())
    elif sign == "dtype":
        down.weight = torch.nn.Parameter(down.weight.to(torch.float8_e5m2), requires_grad=False)
    else:
        down.weight_scale_inv = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match=r"1 parameters are quantised.*0\.mlp\.down_proj\.weight;"):
        derive_bindings(model)


@pytest.mark.parametrize("method", ["UnquantizedFusedMoEMethod", "BaseKVCacheMethod"])
def test_what_is_not_quantised_is_not_refused(method: str) -> None:
    model = engine_model(DENSE)
    wrapped = SimpleNamespace(old_quant_method=type(method, (), {})())
    model.model.layers[0].mlp.down_proj.quant_method = wrapped
    derive_bindings(model)


def test_restore_load_finish() -> None:
    ranks = Ranks(1, 2)
    model = quantise(engine_model(DENSE, ranks))
    restored: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}

    def restore(name: str, module: torch.nn.Module, parameter: torch.Tensor) -> torch.Tensor:
        restored[name] = module, torch.zeros(parameter.shape)
        return restored[name][1]

    bindings = derive_bindings(model, tp_rank=1, tp_size=2, restore=restore)
    before = addresses(model)
    for seed in (1, 2, 3):
        full = trainer_weights(DENSE, seed)
        pull(bindings, full)
        for module, tensor in restored.values():
            store(module, tensor)
        assert_same(model, quantise(load(engine_model(DENSE, ranks), full)))
    assert addresses(model) == before
    assert "model.layers.0.mlp.down_proj.weight" in coverage(bindings, model).untouched


def test_restore_may_leave_a_parameter_alone() -> None:
    model = quantise(engine_model(DENSE))
    bindings = derive_bindings(model, restore=lambda name, module, parameter: None)
    assert "model.layers.0.mlp.down_proj.weight" not in bindings
    assert "model.layers.0.mlp.down_proj.bias" in bindings


# ---- coverage ------------------------------------------------------------------------------------


def with_draft() -> torch.nn.Module:
    model = engine_model(DENSE)
    model.mtp = torch.nn.Module()
    model.mtp.proj = Linear(4, 4, None, False, Ranks())
    return model


def test_a_draft_module_is_not_forgotten() -> None:
    with (
        WeightSender(trainer_weights(DENSE)) as sender,
        WeightReceiver(derive_bindings(with_draft())) as receiver,
        pytest.raises(WeightMismatchError, match=r"1 expected but not sent: mtp\.proj\.weight;"),
    ):
        receiver.pull(sender.offer())


@pytest.mark.parametrize("leave", ["mtp", "mtp.proj", "mtp.proj.weight"])
def test_a_draft_module_may_be_left_explicitly(leave: str) -> None:
    model = with_draft()
    bindings = derive_bindings(model, rules=Rules(leave=[leave]))
    pull(bindings, trainer_weights(DENSE))
    found = coverage(bindings, model, drafter=Linear(2, 2, None, True, Ranks()))
    assert found.untouched == ("drafter.bias", "drafter.weight", "mtp.proj.weight")
    assert (model.mtp.proj.weight == -7).all()


def test_coverage_counts_elements() -> None:
    model = engine_model(DENSE, Ranks(2, 4))
    found = coverage(derive_bindings(model, tp_rank=2, tp_size=4), model)
    assert found.untouched == ()
    heads = ("lm_head.weight", "model.embed_tokens.weight")
    assert found.partly == dict.fromkeys(heads, (5 * DENSE.hidden, 16 * DENSE.hidden))
    assert str(found) == (
        "25 of 25 parameters are synced, 2 of them in part "
        "(lm_head.weight, model.embed_tokens.weight)"
    )


def test_coverage_sees_parameters_that_were_replaced() -> None:
    model = engine_model(DENSE)
    bindings = derive_bindings(model)
    qkv = model.model.layers[1].self_attn.qkv_proj
    qkv.weight = torch.nn.Parameter(qkv.weight.detach().clone(), requires_grad=False)
    found = coverage(bindings, model)
    assert found.untouched == ("model.layers.1.self_attn.qkv_proj.weight",)
    assert str(found).endswith("; not touched: model.layers.1.self_attn.qkv_proj.weight")


# ---- what cannot be right ------------------------------------------------------------------------


def replace(module: torch.nn.Module, name: str, *shape: int) -> None:
    setattr(module, name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))


def refused(model: torch.nn.Module, **options: object) -> str:
    with pytest.raises(ValueError) as caught:
        derive_bindings(model, **options)
    return str(caught.value)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_its_size(rank: int, size: int) -> None:
    text = refused(engine_model(DENSE), tp_rank=rank, tp_size=size)
    assert text == f"derive_bindings: tp_rank={rank} is no rank of tp_size={size}"


@pytest.mark.parametrize(
    ("path", "local", "shape", "says"),
    [
        ("self_attn.qkv_proj", "weight", (8, 32), "has 8 rows, and its parts have [16, 8, 8]"),
        ("self_attn.o_proj", "weight", (16, 8), "is (16, 8), and its layer says (8, 16)"),
        ("self_attn.o_proj", "bias", (9,), "has 9 elements in dimension 0, and its layer says 8"),
        ("mlp.gate_up_proj", "weight", (32, 8), "has 32 rows, and its parts have [12, 12]"),
        ("mlp.extra", "weight", (16, 8), "has 16 elements in dimension 0, and its layer says 12"),
    ],
)
def test_rearranged_parameters(path: str, local: str, shape: tuple[int, ...], says: str) -> None:
    model = engine_model(DENSE)
    replace(model.model.layers[1].get_submodule(path), local, *shape)
    text = refused(model)
    assert f"model.layers.1.{path}.{local} {says}" in text
    assert text.endswith("; was it rearranged after it was loaded?")


@pytest.mark.parametrize(("local", "shape"), [("w13_weight", (6, 16, 8)), ("w2_weight", (6, 8, 8))])
def test_rearranged_experts(local: str, shape: tuple[int, ...]) -> None:
    model = engine_model(MIXTURE)
    replace(model.model.layers[0].mlp.experts, local, *shape)
    text = refused(model)
    assert f"{local} " in text and str(shape) in text
    assert text.endswith("the layer says 4; were they rearranged after they were loaded?")


def test_a_shard_must_say_which() -> None:
    model = engine_model(DENSE, Ranks(1, 2))
    del model.model.layers[0].mlp.down_proj.tp_rank
    text = refused(model)
    assert "model.embed_tokens" not in text  # its indices tell
    assert "0.mlp.down_proj.weight is one of 2 shards and does not say which" in text
    assert "tp_rank= and tp_size=" in text
    derive_bindings(model, tp_rank=1, tp_size=2)


def test_repeated_heads_must_be_known() -> None:
    model = engine_model(DENSE, Ranks(3, 4))
    del model.model.layers[0].self_attn.qkv_proj.total_num_kv_heads
    assert "give source_config=" in refused(model, tp_rank=3, tp_size=4)
    derive_bindings(model, tp_rank=3, tp_size=4, source_config={"num_key_value_heads": 2})


@pytest.mark.parametrize(("attribute", "value"), [("total_num_heads", 5), ("num_kv_heads", 3)])
def test_heads_must_fit(attribute: str, value: int) -> None:
    model = engine_model(DENSE, Ranks(1, 2))
    setattr(model.model.layers[0].self_attn.qkv_proj, attribute, value)
    text = refused(model, tp_rank=1, tp_size=2)
    assert "0.self_attn.qkv_proj.weight has 2 and" in text
    assert text.endswith("which does not fit 2 ranks")


def test_parts_that_ranks_cannot_share() -> None:
    model = engine_model(DENSE, Ranks(1, 2))
    model.model.layers[0].mlp.gate_up_proj.output_sizes = [11, 13]
    assert "[11, 13] rows, which 2 ranks cannot share evenly" in refused(model)


def test_parts_need_their_names() -> None:
    model = engine_model(DENSE)
    model.packed_modules_mapping = {"gate_up_proj": ["a", "b", "c"]}
    text = refused(model)
    assert "0.mlp.gate_up_proj.weight is fused from 2 parts" in text
    assert "3 names for them (a, b, c); say in Rules(fused=) or Rules(custom=)" in text


def test_a_smaller_vocabulary_is_refused() -> None:
    assert refused(engine_model(DENSE), source_config={"vocab_size": 36}) == (
        "derive_bindings: model.embed_tokens.weight has a vocabulary of 37 rows, and "
        "source_config says that the trainer has 36"
    )


@pytest.mark.parametrize("indices", [False, True])
def test_rows_must_hold_the_vocabulary(indices: bool) -> None:
    model = engine_model(DENSE)
    if not indices:
        del model.lm_head.shard_indices
    replace(model.lm_head, "weight", 30, DENSE.hidden)
    assert "lm_head.weight has 30 rows, which do not hold rows" in refused(model)


def test_experts_must_be_known() -> None:
    model = engine_model(MIXTURE, Ranks(0, 2, expert_parallel=True))
    experts = model.model.layers[0].mlp.experts
    experts._expert_map[2] = -1
    assert "places for 3 experts, and expert_map fills [0, 2]" in refused(model)
    experts._expert_map = None
    assert "holds 3 of 6 experts and does not say which" in refused(model)
    experts.enable_eplb = True
    assert "moves its experts about while it runs (enable_eplb)" in refused(model)


def test_pipelines_are_refused() -> None:
    model = engine_model(DENSE)
    model.model.layers[1] = type("PPMissingLayer", (torch.nn.Module,), {})()
    assert "model.layers.1 is on another pipeline rank" in refused(model)


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys, arctic_rl_c; arctic_rl_c.derive_bindings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
