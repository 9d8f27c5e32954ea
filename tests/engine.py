# SPDX-License-Identifier: Apache-2.0
"""A small double of an inference engine's model, and a loader of it that is plainly right.

The layers carry the attributes that vLLM's have. Each keeps a `load(full)` that fills it from the
trainer's whole tensors with torch's chunk and indexing, layer by layer: what a sync must equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

Full = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a small model; the defaults have 2 key-value heads, so that 4 ranks repeat them."""

    layers: int = 2
    hidden: int = 8
    heads: int = 4
    kv_heads: int = 2
    head: int = 4
    v_head: int = 4
    inner: int = 12
    vocab: int = 37
    experts: int = 0  # 0: a dense model
    expert_inner: int = 4
    bias: bool = True
    tied: bool = False
    pad: int = 16  # rows of the vocabulary are a multiple of this
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    """Where this engine process is."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False


def _kv(sizes: Sizes, ranks: Ranks) -> int:
    return max(1, sizes.kv_heads // ranks.size)


def _new(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, -7.0), requires_grad=False)


class UnquantizedLinearMethod:
    pass


class Layer(torch.nn.Module):
    """What all layers have, and `sources`: how each parameter is made of the trainer's."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = ranks.rank, ranks.size
        self.quant_method = UnquantizedLinearMethod()

    def part(self, full: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return full.chunk(self.tp_size, dim)[self.tp_rank] if full.numel() else full


class QKVParallelLinear(Layer):
    def __init__(self, sizes: Sizes, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.head_size, self.v_head_size = sizes.head, sizes.v_head
        self.total_num_heads, self.total_num_kv_heads = sizes.heads, sizes.kv_heads
        self.num_heads, self.num_kv_heads = sizes.heads // ranks.size, _kv(sizes, ranks)
        local = [self.num_heads * sizes.head]
        local += [self.num_kv_heads * sizes.head, self.num_kv_heads * sizes.v_head]
        self.output_sizes = [size * ranks.size for size in local]
        self.input_size = self.input_size_per_partition = sizes.hidden
        self.output_size = sum(self.output_sizes)
        self.weight = _new(sum(local), sizes.hidden)
        self.bias = _new(sum(local)) if sizes.bias else None

    def load(self, path: str, full: Full) -> None:
        stem = path.rpartition(".")[0]
        for local, target in self.named_parameters():
            q, k, v = (full[f"{stem}.{part}_proj.{local}"] for part in "qkv")
            # One head at a time, by the number of the query heads that use it.
            group = self.total_num_heads // self.total_num_kv_heads
            mine = [self.tp_rank * self.num_heads + i for i in range(self.num_heads)]
            used = sorted({head // group for head in mine})
            assert len(used) == self.num_kv_heads
            rows = [q.split(self.head_size)[head] for head in mine]
            rows += [k.split(self.head_size)[head] for head in used]
            rows += [v.split(self.v_head_size)[head] for head in used]
            target.copy_(torch.cat(rows))


class MergedColumnParallelLinear(Layer):
    def __init__(self, rows: list[int], columns: int, bias: bool, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.output_sizes, self.output_size = rows, sum(rows)
        self.input_size = self.input_size_per_partition = columns
        self.weight = _new(sum(rows) // ranks.size, columns)
        self.bias = _new(sum(rows) // ranks.size) if bias else None

    def load(self, path: str, full: Full) -> None:
        stem = path.rpartition(".")[0]
        for local, target in self.named_parameters():
            gate, up = full[f"{stem}.gate_proj.{local}"], full[f"{stem}.up_proj.{local}"]
            target.copy_(torch.cat([self.part(gate), self.part(up)]))


class Linear(Layer):
    """Column-parallel (dim 0), row-parallel (dim 1) or whole (None)."""

    def __init__(self, rows: int, columns: int, dim: int | None, bias: bool, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.dim = dim
        self.output_size, self.input_size = rows, columns
        here = [rows, columns]
        if dim is not None:
            here[dim] //= ranks.size
        self.output_size_per_partition, self.input_size_per_partition = here
        self.weight = _new(*here)
        self.bias = _new(here[0]) if bias else None

    def load(self, path: str, full: Full) -> None:
        weight = full[f"{path}.weight"]
        self.weight.copy_(weight if self.dim is None else self.part(weight, self.dim))
        if self.bias is not None:
            bias = full[f"{path}.bias"]
            self.bias.copy_(self.part(bias) if self.dim == 0 else bias)


class VocabParallelEmbedding(Layer):
    def __init__(self, sizes: Sizes, ranks: Ranks, *, bias: bool = False) -> None:
        super().__init__(ranks)
        del self.tp_rank  # as in vLLM, where the indices tell
        self.org_vocab_size = sizes.vocab
        step = sizes.pad * ranks.size
        self.num_embeddings_padded = -(-sizes.vocab // step) * step
        rows = self.num_embeddings_padded // ranks.size
        start, end = (min(rows * (ranks.rank + i), sizes.vocab) for i in (0, 1))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        self.weight = _new(rows, sizes.hidden)
        self.bias = _new(rows) if bias else None

    def load(self, path: str, full: Full) -> None:
        first, last = vars(self.shard_indices).values()
        for local, target in self.named_parameters():
            for row in range(first, last):
                target[row - first] = full[f"{path}.{local}"][row]


class FusedMoE(Layer):
    def __init__(self, sizes: Sizes, ranks: Ranks) -> None:
        super().__init__(Ranks() if ranks.expert_parallel else ranks)
        self.global_num_experts = self.local_num_experts = sizes.experts
        self._expert_map: torch.Tensor | None = None
        if ranks.expert_parallel:  # every size-th expert, which is not a run
            mine = list(range(ranks.rank, sizes.experts, ranks.size))
            self.local_num_experts = len(mine)
            self._expert_map = torch.full((sizes.experts,), -1, dtype=torch.int32)
            self._expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        self.intermediate_size_per_partition = width = sizes.expert_inner // self.tp_size
        self.w13_weight = _new(self.local_num_experts, 2 * width, sizes.hidden)
        self.w2_weight = _new(self.local_num_experts, sizes.hidden, width)
        if sizes.bias:
            self.w13_bias = _new(self.local_num_experts, 2 * width)
            self.w2_bias = _new(self.local_num_experts, sizes.hidden)

    @property
    def expert_map(self) -> torch.Tensor | None:
        return self._expert_map

    def load(self, path: str, full: Full) -> None:
        for expert in range(self.global_num_experts):
            at = expert if self._expert_map is None else int(self._expert_map[expert])
            if at < 0:
                continue
            for local, target in self.named_parameters():
                kind = local.partition("_")[2]
                gate, up, down = (
                    full[f"{path}.{expert}.{leaf}_proj.{kind}"] for leaf in ("gate", "up", "down")
                )
                if local.startswith("w13"):
                    target[at] = torch.cat([self.part(gate), self.part(up)])
                else:
                    target[at] = self.part(down, 1) if kind == "weight" else down


class Norm(torch.nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = _new(sizes.hidden)

    def load(self, path: str, full: Full) -> None:
        self.weight.copy_(full[f"{path}.weight"])


def _block(sizes: Sizes, ranks: Ranks) -> torch.nn.Module:
    block = torch.nn.Module()
    block.self_attn = torch.nn.Module()
    block.self_attn.qkv_proj = QKVParallelLinear(sizes, ranks)
    width = sizes.heads * sizes.v_head
    block.self_attn.o_proj = Linear(sizes.hidden, width, 1, sizes.bias, ranks)
    block.mlp = torch.nn.Module()
    if sizes.experts:
        block.mlp.gate = Linear(sizes.experts, sizes.hidden, None, False, ranks)
        block.mlp.experts = FusedMoE(sizes, ranks)
    else:
        rows = [sizes.inner, sizes.inner]
        block.mlp.gate_up_proj = MergedColumnParallelLinear(rows, sizes.hidden, sizes.bias, ranks)
        block.mlp.down_proj = Linear(sizes.hidden, sizes.inner, 1, sizes.bias, ranks)
        block.mlp.extra = Linear(sizes.inner, sizes.hidden, 0, sizes.bias, ranks)
    block.norm = Norm(sizes)
    return block


def engine_model(sizes: Sizes, ranks: Ranks | None = None) -> torch.nn.Module:
    ranks = ranks or Ranks()
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = VocabParallelEmbedding(sizes, ranks)
    model.model.layers = torch.nn.ModuleList(_block(sizes, ranks) for _ in range(sizes.layers))
    model.model.norm = Norm(sizes)
    model.lm_head = VocabParallelEmbedding(sizes, ranks)
    if sizes.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def load(model: torch.nn.Module, full: Full) -> torch.nn.Module:
    """The reference: every layer takes its own."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for path, module in model.named_modules():
        if hasattr(module, "load") and not (tied and path == "lm_head"):
            module.load(path, full)
    return model


def _layer_shapes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    def linear(
        name: str, rows: int, columns: int, bias: bool = sizes.bias
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)

    hidden = sizes.hidden
    yield from linear("self_attn.q_proj", sizes.heads * sizes.head, hidden)
    yield from linear("self_attn.k_proj", sizes.kv_heads * sizes.head, hidden)
    yield from linear("self_attn.v_proj", sizes.kv_heads * sizes.v_head, hidden)
    yield from linear("self_attn.o_proj", hidden, sizes.heads * sizes.v_head)
    if sizes.experts:
        yield from linear("mlp.gate", sizes.experts, hidden, False)
        for expert in range(sizes.experts):
            for leaf in ("gate_proj", "up_proj"):
                yield from linear(f"mlp.experts.{expert}.{leaf}", sizes.expert_inner, hidden)
            yield from linear(f"mlp.experts.{expert}.down_proj", hidden, sizes.expert_inner)
    else:
        for leaf in ("gate_proj", "up_proj", "extra"):
            yield from linear(f"mlp.{leaf}", sizes.inner, hidden)
        yield from linear("mlp.down_proj", hidden, sizes.inner)
    yield "norm.weight", (hidden,)


def trainer_weights(sizes: Sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors by the trainer's names. A tied head is not among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
        **sizes.extra,
    }
    for layer in range(sizes.layers):
        for name, shape in _layer_shapes(sizes):
            shapes[f"model.layers.{layer}.{name}"] = shape
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocab, sizes.hidden)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
