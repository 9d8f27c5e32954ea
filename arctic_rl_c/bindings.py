# SPDX-License-Identifier: Apache-2.0
"""Where a trainer's tensors go in the model of an inference engine.

Engines keep weights in other shapes than trainers do: q, k and v in one tensor, gate and up in
another, all experts of a layer in a third, each cut for tensor parallelism and with the vocabulary
padded. `derive_bindings` reads that off the layers of a loaded model and returns what
`WeightReceiver` takes, so that one pull writes the engine's own parameters in place.

Layers are known by the attributes that vLLM gives them, never by class, and no engine is imported:

    attributes                                        the layer is
    num_heads, num_kv_heads, head_size (head_dim)     q, k and v in one
    output_sizes                                      several column-parallel linears in one
    org_vocab_size                                    an embedding or output head, padded
    w13_weight, w2_weight                             the experts of a layer
    output_size, input_size                           a linear, maybe a shard in either dimension

What fits none of these is taken as it is. What contradicts itself, as a parameter does that the
engine rearranged after loading, is a ValueError with its name: nothing is guessed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from arctic_rl_c.weights import Binding

#: Parts of names that are never synced; what `WeightReceiver(non_synced=None)` means.
NON_SYNCED = (
    ".inv_freq",
    ".weight_scale",
    ".input_scale",
    ".weight_zero_point",
    ".weight_qzeros",
    ".weight_g_idx",
    ".weight_packed",
    ".weight_shape",
)

_QKV = ("q_proj", "k_proj", "v_proj")
_FUSED = {"qkv_proj": _QKV, "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = ("gate_proj", "up_proj", "down_proj")
#: Modules that adapters put around a layer, and that the trainer's names do not have.
_WRAPPERS = frozenset({"base_layer"})
_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """How a trainer's names follow from an engine's.

    fused: leaf name of a fused layer to the trainer's names of its parts, before the model's own
        `packed_modules_mapping` and the usual qkv_proj and gate_up_proj. A single name says that
        the trainer's tensor is fused as well.
    experts: the trainer's leaf names of an expert's gate, up and down projections; None asks the
        model's `get_expert_mapping()`, and failing that means gate_proj, up_proj and down_proj.
    stacked_experts: the trainer too has the experts of a layer in one tensor, as
        `experts.gate_up_proj` (experts, 2 x intermediate, hidden) and `experts.down_proj`.
    non_synced: parts of names that are left alone; give the receiver the same.
    leave: names of modules or parameters that this trainer does not have (a draft model, say).
        They keep what they hold, and `coverage` lists them.
    rename: from the name that follows from the engine's to the trainer's.
    custom: asked first for each parameter, with its name, its module and itself. Returns the
        destinations by the trainer's names, or None for what is done otherwise.
    """

    fused: Mapping[str, Sequence[str]] | None = None
    experts: Sequence[str] | None = None
    stacked_experts: bool = False
    non_synced: Sequence[str] = NON_SYNCED
    leave: Sequence[str] = ()
    rename: Callable[[str], str] | None = None
    custom: Callable[[str, Any, Any], Mapping[str, Any] | None] | None = None


def derive_bindings(
    model: Any,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    source_config: Any = None,
    rules: Rules | None = None,
    restore: Callable[[str, Any, Any], Any] | None = None,
) -> dict[str, Any]:
    """Return what `WeightReceiver` takes for `model`: the trainer's names to destinations.

    model: a torch.nn.Module of an inference engine, loaded. The destinations are its parameters
        and views of them, so a pull changes no address. A parameter that the engine replaces
        later needs bindings derived anew.
    tp_rank, tp_size: for layers that do not say it themselves.
    source_config: the trainer's model configuration, a mapping or an object, asked for what the
        engine's layers do not tell: vocab_size (the trainer's rows, when it pads them as well),
        num_key_value_heads and the number of experts.
    rules: how names follow from one another.
    restore: for parameters that the engine holds in a quantised form, which no copy may write to.
        Called with the name, the module and the parameter; returns the tensor that the parameter
        was before it was quantised, kept by the caller and filled by each pull, or None to leave
        this one alone. After the pull the caller quantises it into the engine's parameter.
        Without it, quantised parameters are refused.

    Tied parameters are found under all their names, any of which delivers them. A rank that holds
    nothing of a tensor (an expert of another rank, rows that are all padding) gets a destination
    outside of the model, of one row or none: the name is checked, and the model not written to.

    Raises ValueError, with the parameter's name, for quantised parameters, for parameters whose
    shape does not follow from what their layer says, and for two that want the same name.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"derive_bindings: tp_rank={tp_rank} is no rank of tp_size={tp_size}")
    derivation = _Derivation(model, tp_rank, tp_size, source_config, rules or Rules(), restore)
    return derivation.run()


def expected_names(model: Any, **options: Any) -> list[str]:
    """Return the names that an offer must bring, sorted: a tied tensor's first name only.

    Takes the arguments of `derive_bindings`, and raises as that does.
    """
    names, seen = [], set()
    for name, destination in derive_bindings(model, **options).items():
        places = tuple(_place(view) for view in _views(destination))
        empty = all(view.numel() == 0 for view in _views(destination))
        if empty or places not in seen:
            names.append(name)
        seen.add(places)
    return sorted(names)


# ---- coverage ------------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """What a full pull writes of an engine's parameters, and what it leaves alone.

    parameters: number of parameters; tied ones count once.
    untouched: names of parameters of which nothing is written.
    partly: names of those written in part (padding stays): elements written, elements there.
    """

    parameters: int
    untouched: tuple[str, ...]
    partly: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        """Say it in one line, for a log."""
        line = f"{self.parameters - len(self.untouched)} of {self.parameters} parameters are synced"
        if self.partly:
            line += f", {len(self.partly)} of them in part ({_some(sorted(self.partly))})"
        if self.untouched:
            line += f"; not touched: {_some(self.untouched)}"
        return line


def coverage(bindings: Mapping[str, Any], model: Any, **others: Any) -> Coverage:
    """Compare bindings with all that an engine holds, by memory.

    Names what no sync will change: non-synced names, what `Rules.leave` names, and parameters that
    were given other memory since the bindings were derived. others: further modules of the engine,
    such as a draft model; their parameters are named `<keyword>.<name>`.

    A quantised parameter that is filled through `restore` counts as untouched: the sync itself
    writes the restored tensor.
    """
    parameters = _memory({"": model, **others})
    starts = [start for start, _, _ in parameters]
    written = dict.fromkeys(starts, 0)
    seen = set()
    for destination in bindings.values():
        for view in _views(destination):
            at = bisect.bisect_right(starts, view.data_ptr()) - 1
            if view.numel() == 0 or at < 0 or _place(view) in seen:
                continue
            start, parameter, _ = parameters[at]
            if view.data_ptr() < start + _extent(parameter):
                seen.add(_place(view))
                written[start] += view.numel()
    partly = {
        name: (written[start], parameter.numel())
        for start, parameter, name in parameters
        if 0 < written[start] < parameter.numel()
    }
    untouched = sorted(name for start, _, name in parameters if written[start] == 0)
    return Coverage(len(parameters), tuple(untouched), partly)


def _memory(models: Mapping[str, Any]) -> list[tuple[int, Any, str]]:
    """(address, parameter, first name) of each parameter that has elements, by address."""
    found: dict[int, tuple[int, Any, str]] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            start = parameter.data_ptr()
            if parameter.numel() and start not in found:
                found[start] = (start, parameter, _join(prefix, name))
    return sorted(found.values(), key=lambda entry: entry[0])


def _extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return int(elements * tensor.element_size())


def _views(destination: Any) -> Iterator[Any]:
    if isinstance(destination, Binding):
        yield destination.tensor
    elif isinstance(destination, (list, tuple)):
        for item in destination:
            yield from _views(item)
    elif destination is not None:
        yield destination


def _place(view: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return view.data_ptr(), tuple(view.shape), tuple(view.stride())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


# ---- derivation ----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One of the tensors that a fused parameter is made of."""

    rows: int  # here
    start: int  # of the trainer's rows
    full: int  # of the trainer


class _Experts(NamedTuple):
    """What a layer of experts says about itself."""

    total: int  # of the model
    places: dict[int, int]  # expert of the model to its place here, if it is here
    width: int  # intermediate size here
    gated: bool  # gate and up, or up alone
    rank: int
    size: int

    @property
    def full(self) -> int:
        return self.width * self.size


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _box(view: Any, dim: int, start: int, full: int) -> Any:
    """A destination for part of a source, or for all of it."""
    return view if view.shape[dim] == full else Binding(view, dim, start, full)


def _number(owner: Any, *names: str) -> int | None:
    """The first of these attributes that is a count."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _config_number(config: Any, *names: str) -> int | None:
    """A count of a model configuration, which multimodal models keep one level further down."""
    for owner in (config, _field(config, "text_config")):
        for name in names:
            value = _field(owner, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _field(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _quantised(module: Any, local: str, parameter: Any, siblings: Sequence[str]) -> bool:
    """Whether a parameter is anything else than the plain weights that a trainer has."""
    if local.endswith("bias") and parameter.dtype.is_floating_point:
        return False
    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # what a modular method is made from
    kind = type(method).__name__
    if method is not None and "Unquantized" not in kind and "KVCache" not in kind:
        return True
    packed = not parameter.dtype.is_floating_point or parameter.element_size() == 1
    scales = (f"{local}_scale", f"{local}_scale_inv", f"{local}_packed")
    return packed or any(name in siblings for name in scales)


class _Derivation:
    """One run of derive_bindings."""

    def __init__(
        self,
        model: Any,
        tp_rank: int,
        tp_size: int,
        config: Any,
        rules: Rules,
        restore: Callable[[str, Any, Any], Any] | None,
    ) -> None:
        self.model = model
        self.tp = (tp_rank, tp_size)
        self.config = config
        self.rules = rules
        self.restore = restore
        self.found: dict[str, list[Any]] = {}
        self.owners: dict[str, str] = {}  # the trainer's name to the engine's that took it
        self.refused: list[str] = []
        self.spare: dict[int, Any] = {}
        self.expert_names = self._expert_names()

    def run(self) -> dict[str, Any]:
        for path, module in self.model.named_modules(remove_duplicate=False):
            if type(module).__name__ == "PPMissingLayer":
                raise ValueError(
                    f"derive_bindings: {path} is on another pipeline rank, and pipelines are not "
                    "supported: the names that other ranks hold are not known here"
                )
            named = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for local, parameter in named.items():
                self._parameter(path, module, local, parameter, tuple(named))
        if self.refused:
            raise ValueError(
                f"derive_bindings: {len(self.refused)} parameters are quantised, so that a copy of "
                f"the trainer's would corrupt them: {_some(self.refused)}; give restore= to load "
                "them through tensors of the original form, or use views() with the engine's loader"
            )
        return {
            name: places[0] if len(places) == 1 else places for name, places in self.found.items()
        }

    # ---- one parameter ----

    def _parameter(
        self, path: str, module: Any, local: str, parameter: Any, siblings: Sequence[str]
    ) -> None:
        name = _join(path, local)
        left = any(name == part or name.startswith(part + ".") for part in self.rules.leave)
        if left or any(part in name for part in self.rules.non_synced):
            return
        if self.rules.custom is not None:
            chosen = self.rules.custom(name, module, parameter)
            if chosen is not None:
                for source, destination in chosen.items():
                    self._add(name, source, destination, exact=True)
                return
        if _quantised(module, local, parameter, siblings):
            if self.restore is None:
                self.refused.append(name)
                return
            parameter = self.restore(name, module, parameter)
            if parameter is None:
                return
        self._place(name, path, module, local, parameter)

    def _place(self, name: str, path: str, module: Any, local: str, parameter: Any) -> None:
        """Find out what kind of layer it belongs to."""
        parent = _join(*(part for part in path.split(".") if part not in _WRAPPERS))
        tensor = parameter.detach()
        if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
            if local in ("w13_weight", "w13_bias", "w2_weight", "w2_bias"):
                self._experts(name, parent, module, local, tensor)
                return
        elif local in ("weight", "bias"):
            leaf = parent.rpartition(".")[2]
            if _number(module, "org_vocab_size") is not None:
                self._add(name, _join(parent, local), self._vocabulary(name, module, parameter))
                return
            parts = self._parts(name, leaf, module, tensor)
            if parts is not None:
                self._fused(name, parent, local, tensor, parts, _is_qkv(module))
                return
            parameter = self._linear(name, module, parameter)
        self._add(name, _join(parent, local), parameter)

    def _add(self, name: str, source: str, destination: Any, *, exact: bool = False) -> None:
        if self.rules.rename is not None and not exact:
            source = self.rules.rename(source)
        owner = self.owners.setdefault(source, name)
        if owner != name:
            raise ValueError(
                f"derive_bindings: both {owner} and {name} would be filled from {source}; is that "
                "what rename or custom should say?"
            )
        places = self.found.setdefault(source, [])
        places.extend(destination if isinstance(destination, list) else [destination])

    def _shards(self, name: str, module: Any) -> tuple[int, int]:
        """(rank, size) of a layer's own tensor parallelism."""
        size, rank = _number(module, "tp_size"), _number(module, "tp_rank")
        if size is None:
            return self.tp
        if rank is None and size in (1, self.tp[1]):
            rank = 0 if size == 1 else self.tp[0]
        if rank is None or not 0 <= rank < size:
            raise ValueError(
                f"derive_bindings: {name} is one of {size} shards and does not say which; give "
                "tp_rank= and tp_size="
            )
        return rank, size

    def _shard(self, name: str, module: Any, tensor: Any, dim: int, full: int) -> Any:
        """A destination for the rank's part of `full` elements, or for all of them."""
        rank, size = self._shards(name, module)
        here = tensor.shape[dim]
        if here not in (full, full // size) or (here != full and full % size):
            raise ValueError(
                f"derive_bindings: {name} has {here} elements in dimension {dim}, and its layer "
                f"says {full} over {size} ranks; was it rearranged after it was loaded?"
            )
        return _box(tensor, dim, rank * here, full)

    # ---- layers ----

    def _linear(self, name: str, module: Any, parameter: Any) -> Any:
        rows, columns = _number(module, "output_size"), _number(module, "input_size")
        cut = columns is not None and parameter.dim() == 2 and parameter.shape[1] != columns
        if not cut or columns is None:
            return parameter if rows is None else self._shard(name, module, parameter, 0, rows)
        whole_input = _number(module, "input_size_per_partition") == columns
        if whole_input or (rows is not None and parameter.shape[0] != rows):
            raise ValueError(
                f"derive_bindings: {name} is {tuple(parameter.shape)}, and its layer says "
                f"{(rows, columns)}; was it rearranged after it was loaded?"
            )
        return self._shard(name, module, parameter, 1, columns)

    def _vocabulary(self, name: str, module: Any, parameter: Any) -> Any:
        """The rows of real tokens; padding and added tokens stay as they are."""
        real, rows = int(module.org_vocab_size), int(parameter.shape[0])
        indices = getattr(module, "shard_indices", None)
        if indices is not None:
            start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        else:
            rank, size = self._shards(name, module)
            start, end = min(rank * rows, real), min((rank + 1) * rows, real)
            if rows * size < real:
                start = end + 1  # refused below
        sent = _config_number(self.config, "vocab_size") or real
        if not 0 <= start <= end <= real or end - start > rows:
            raise ValueError(
                f"derive_bindings: {name} has {rows} rows, which do not hold rows {start} to {end} "
                f"of a vocabulary of {real}"
            )
        if sent < real:
            raise ValueError(
                f"derive_bindings: {name} has a vocabulary of {real} rows, and source_config says "
                f"that the trainer has {sent}"
            )
        if start == end:
            return Binding(self._spare_row(parameter), 0, 0, sent)
        if end - start < rows:
            parameter = parameter.detach().narrow(0, 0, end - start)
        return _box(parameter, 0, start, sent)

    def _spare_row(self, parameter: Any) -> Any:
        """A row that takes the place of none, one for each parameter.

        Tied names are known by their common destination, which an empty one is not.
        """
        key = parameter.data_ptr()
        if key not in self.spare:
            self.spare[key] = parameter.new_empty((1, *parameter.shape[1:]))
        return self.spare[key]

    def _parts(self, name: str, leaf: str, module: Any, tensor: Any) -> list[_Part] | None:
        """What a parameter is fused from; None if it is not."""
        if _is_qkv(module):
            return self._qkv_parts(name, module)
        sizes = getattr(module, "output_sizes", None)
        if sizes is None and leaf == "gate_up_proj":
            full = _number(module, "output_size")
            if full is None:
                full = int(tensor.shape[0]) * self._shards(name, module)[1]
            sizes = [full // 2, full - full // 2]
        if sizes is None:
            return None
        rank, size = self._shards(name, module)
        if int(tensor.shape[0]) == sum(sizes):
            rank, size = 0, 1  # a replicated layer
        if any(full % size for full in sizes):
            raise ValueError(
                f"derive_bindings: {name} is fused from {list(sizes)} rows, which {size} ranks "
                "cannot share evenly"
            )
        return [_Part(full // size, rank * (full // size), full) for full in sizes]

    def _qkv_parts(self, name: str, module: Any) -> list[_Part]:
        """The heads of a rank: q is shared out, k and v too or, with few heads, repeated."""
        rank, size = self._shards(name, module)
        head = _number(module, "head_size", "head_dim") or 0
        heads, kv_heads = int(module.num_heads), int(module.num_kv_heads)
        total = _number(module, "total_num_heads") or heads * size
        kv_total = _number(module, "total_num_kv_heads")
        if kv_total is None:
            kv_total = _config_number(self.config, "num_key_value_heads", "num_attention_heads")
        if kv_total is None and size == 1:
            kv_total = kv_heads
        if kv_total is None:
            raise ValueError(
                f"derive_bindings: {name} does not say how many key and value heads there are over "
                "all ranks, so they may be shared out or repeated; give source_config="
            )
        if heads * size != total or kv_heads * size % kv_total or kv_total % kv_heads:
            raise ValueError(
                f"derive_bindings: {name} has {heads} and {kv_heads} heads of {total} and "
                f"{kv_total}, which does not fit {size} ranks"
            )
        first = rank // (kv_heads * size // kv_total) * kv_heads
        value = _number(module, "v_head_size") or head
        return [
            _Part(heads * head, rank * heads * head, total * head),
            _Part(kv_heads * head, first * head, kv_total * head),
            _Part(kv_heads * value, first * value, kv_total * value),
        ]

    def _fused(
        self, name: str, parent: str, local: str, tensor: Any, parts: list[_Part], qkv: bool
    ) -> None:
        stem, _, leaf = parent.rpartition(".")
        if sum(part.rows for part in parts) != tensor.shape[0]:
            raise ValueError(
                f"derive_bindings: {name} has {tensor.shape[0]} rows, and its parts have "
                f"{[part.rows for part in parts]}; was it rearranged after it was loaded?"
            )
        names = self._part_names(leaf, qkv)
        if len(names) not in (1, len(parts)):
            raise ValueError(
                f"derive_bindings: {name} is fused from {len(parts)} parts, and there are "
                f"{len(names)} names for them ({', '.join(names)}); say in Rules(fused=) or "
                "Rules(custom=) what it is"
            )
        one = len(names) == 1 and len(parts) > 1
        full = sum(part.full for part in parts)
        if one and full == tensor.shape[0]:
            self._add(name, _join(stem, names[0], local), tensor)
            return
        row = before = 0
        for part, leaf_name in zip(parts, names * len(parts) if one else names, strict=True):
            view = tensor.narrow(0, row, part.rows)
            start, whole = (before + part.start, full) if one else (part.start, part.full)
            self._add(name, _join(stem, leaf_name, local), _box(view, 0, start, whole))
            row += part.rows
            before += part.full

    def _part_names(self, leaf: str, qkv: bool) -> list[str]:
        packed = getattr(self.model, "packed_modules_mapping", None) or {}
        for mapping in (self.rules.fused or {}, packed, _FUSED):
            if leaf in mapping:
                return list(mapping[leaf])
        return list(_QKV) if qkv else [leaf]

    # ---- experts ----

    def _expert_names(self) -> tuple[str, str, str, str]:
        """The trainer's gate, up and down, and the name of an up projection without a gate."""
        if self.rules.experts is not None:
            gate, up, down = self.rules.experts
            return gate, up, down, up
        mapping = getattr(self.model, "get_expert_mapping", None)
        leaves = {}
        for _, weight, expert, shard in mapping() if callable(mapping) else ():
            if expert == 0:
                leaves[shard] = weight.rstrip(".").rpartition(".")[2]
        if not {"w1", "w2", "w3"} <= leaves.keys():
            gate, up, down = _EXPERTS
            return gate, up, down, up
        return leaves["w1"], leaves["w3"], leaves["w2"], leaves["w1"]

    def _expert_layout(self, name: str, module: Any) -> _Experts:
        rank, size = self._shards(name, module)
        here, rows = module.w13_weight.shape[:2]
        width = int(module.w2_weight.shape[2])
        said = _number(module, "intermediate_size_per_partition")
        if rows not in (width, 2 * width) or (said is not None and said != width):
            raise ValueError(
                f"derive_bindings: {name}: w13_weight is {tuple(module.w13_weight.shape)} and "
                f"w2_weight {tuple(module.w2_weight.shape)}"
                + ("" if said is None else f", and the layer says {said}")
                + "; were they rearranged after they were loaded?"
            )
        if getattr(module, "enable_eplb", False) is True:
            raise ValueError(
                f"derive_bindings: {name} moves its experts about while it runs (enable_eplb), so "
                "no place of theirs holds; use views() with the engine's loader"
            )
        total = _number(module, "global_num_experts") or _config_number(
            self.config, "num_experts", "num_local_experts", "n_routed_experts"
        )
        total = total or int(here)
        places = self._expert_places(name, module, int(here), total)
        return _Experts(total, places, width, rows == 2 * width, rank, size)

    def _expert_places(self, name: str, module: Any, here: int, total: int) -> dict[int, int]:
        table = getattr(module, "expert_map", None)
        if table is None:
            table = getattr(module, "_expert_map", None)
        if table is not None:
            entries = table.tolist() if hasattr(table, "tolist") else list(table)
            places = {expert: int(at) for expert, at in enumerate(entries[:total]) if at >= 0}
        elif here == total:
            places = {expert: expert for expert in range(here)}
        else:
            first = (_number(module, "ep_rank") or 0) * here
            if _number(module, "ep_rank") is None or first + here > total:
                raise ValueError(
                    f"derive_bindings: {name} holds {here} of {total} experts and does not say "
                    "which: it has no expert_map and no ep_rank"
                )
            places = {first + at: at for at in range(here)}
        if sorted(places.values()) != list(range(here)):
            raise ValueError(
                f"derive_bindings: {name} has places for {here} experts, and expert_map fills "
                f"{sorted(places.values())}"
            )
        return places

    def _experts(self, name: str, parent: str, module: Any, local: str, tensor: Any) -> None:
        layout = self._expert_layout(name, module)
        kind = local.partition("_")[2]
        if self.rules.stacked_experts:
            self._stacked(name, parent, layout, local, tensor)
            return
        for expert in range(layout.total):
            at = layout.places.get(expert)
            view = tensor[0 if at is None else at]
            for leaf, piece, dim, start, full in self._projections(layout, local, view):
                if at is None:  # the name is expected, and nothing of it is kept here
                    piece, start = piece.narrow(0, 0, 0), 0
                    full, dim = (int(view.shape[0]), 0) if dim != 0 else (full, 0)
                box = _box(piece, dim, start, full)
                self._add(name, _join(parent, str(expert), leaf, kind), box)

    def _projections(
        self, layout: _Experts, local: str, view: Any
    ) -> Iterator[tuple[str, Any, int, int, int]]:
        """(leaf, view, dim, start, full) of each of the trainer's tensors in one expert's."""
        gate, up, down, alone = self.expert_names
        start = layout.rank * layout.width
        if local == "w2_bias":  # of the sum, so whole on every rank
            yield down, view, 0, 0, int(view.shape[0])
        elif local == "w2_weight":
            yield down, view, 1, start, layout.full
        elif layout.gated:
            yield gate, view.narrow(0, 0, layout.width), 0, start, layout.full
            yield up, view.narrow(0, layout.width, layout.width), 0, start, layout.full
        else:
            yield alone, view, 0, start, layout.full

    def _stacked(self, name: str, parent: str, layout: _Experts, local: str, tensor: Any) -> None:
        """Of a trainer that has the experts of a layer in one tensor too."""
        leaf = "gate_up_proj" if layout.gated else "up_proj"
        if local.startswith("w2"):
            leaf = "down_proj"
        source = _join(parent, leaf + ("_bias" if local.endswith("bias") else ""))
        if layout.places != {expert: expert for expert in range(layout.total)}:
            if layout.size > 1:
                raise ValueError(
                    f"derive_bindings: {name} is cut by experts and within them, and the trainer's "
                    "tensor can be cut once only"
                )
            for expert, at in sorted(layout.places.items()):
                self._add(name, source, _box(tensor.narrow(0, at, 1), 0, expert, layout.total))
            return
        start, width = layout.rank * layout.width, layout.width
        if local == "w2_bias" or layout.size == 1:
            self._add(name, source, tensor)
        elif local == "w2_weight":
            self._add(name, source, _box(tensor, 2, start, layout.full))
        else:
            halves = 2 if layout.gated else 1
            for half in range(halves):
                view = tensor.narrow(1, half * width, width)
                box = _box(view, 1, half * layout.full + start, halves * layout.full)
                self._add(name, source, box)


def _is_qkv(module: Any) -> bool:
    return (
        _number(module, "num_heads") is not None
        and _number(module, "num_kv_heads") is not None
        and _number(module, "head_size", "head_dim") is not None
    )
