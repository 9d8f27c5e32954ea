# SPDX-License-Identifier: Apache-2.0
"""How far the batch kernels are from the machine's own copy, and from doing it row by row.

Each section is one kernel, one size and one dtype. Competitors: the per-row way (slice, pad,
cat, stack, with `.item()` for every length, as Python adapters do it), and one masked scatter
for the whole batch in torch. Ceilings: a copy of the output into fresh memory, by one thread and
by all, a copy into memory that is already mapped, and the first touch of fresh memory alone.
"Fresh" means newly mapped for each run, with huge pages advised, as the kernels' outputs are.

`--scaling` adds the largest int64 batch with 1, 2, 4, … threads, each count in its own process.

Prompts and responses have uniform lengths from an eighth of their width up, so a little under
half of the output is padding. GB/s counts the bytes of the output once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import common
import numpy as np
import torch
import torch.nn.functional as F

import arctic_rl_c

SIZES = [(128, 512, 1024), (1024, 1024, 3072), (4096, 1024, 3072)]
DTYPES = [torch.int64, torch.float32]
PAD = 151643
Variants = dict[str, Callable[[], object]]


@dataclass
class Batch:
    """One generated batch; `out` is the padded form of `values`."""

    rows: int
    prompt_width: int
    response_width: int
    prompts: torch.Tensor  # lengths
    responses: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    out: torch.Tensor

    @property
    def nested(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows as a pair (values, offsets)."""
        return self.values, self.offsets


def make_batch(rows: int, prompt_width: int, response_width: int, dtype: torch.dtype) -> Batch:
    random = torch.Generator().manual_seed(rows)
    prompts = torch.randint(prompt_width // 8, prompt_width + 1, (rows,), generator=random)
    responses = torch.randint(response_width // 8, response_width + 1, (rows,), generator=random)
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(prompts + responses, 0, out=offsets[1:])
    values = torch.randint(1, 150000, (int(offsets[-1]),), generator=random).to(dtype)
    columns = torch.arange(prompt_width + response_width)
    first = (prompt_width - prompts)[:, None]
    last = (prompt_width + responses)[:, None]
    mask = ((columns >= first) & (columns < last)).to(torch.int64)
    out = torch.full(mask.shape, PAD, dtype=dtype)
    out[mask.bool()] = values
    return Batch(rows, prompt_width, response_width, prompts, responses, offsets, values, mask, out)


def pad_ours(b: Batch) -> tuple[torch.Tensor, int, int]:
    return arctic_rl_c.pad_prompt_response(
        b.nested,
        b.prompts,
        b.responses,
        pad_value=PAD,
        prompt_width=b.prompt_width,
        response_width=b.response_width,
    )


# ---- competitors --------------------------------------------------------------------------------


def pad_rows(b: Batch) -> torch.Tensor:
    """Row by row: slice, pad each part on its side, cat, stack."""
    rows = []
    for i in range(b.rows):
        start, p, r = b.offsets[i].item(), b.prompts[i].item(), b.responses[i].item()
        prompt = F.pad(b.values[start : start + p], (b.prompt_width - p, 0), value=PAD)
        end = start + p + r
        response = F.pad(b.values[start + p : end], (0, b.response_width - r), value=PAD)
        rows.append(torch.cat([prompt, response]))
    return torch.stack(rows)


def pad_scatter(b: Batch) -> torch.Tensor:
    """All rows at once: fill, then a masked scatter."""
    out = torch.full(b.mask.shape, PAD, dtype=b.values.dtype)
    out[b.mask.bool()] = b.values
    return out


def unpad_rows(b: Batch) -> torch.Tensor:
    """Row by row: find the first one, slice, cat."""
    rows = []
    for i in range(b.rows):
        start = b.mask[i].argmax().item()
        length = (b.offsets[i + 1] - b.offsets[i]).item()
        rows.append(b.out[i, start : start + length])
    return torch.cat(rows)


def unpad_gather(b: Batch) -> torch.Tensor:
    """All rows at once: a masked gather."""
    return b.out[b.mask.bool()]


# ---- ceilings -----------------------------------------------------------------------------------


def fresh(tensor: torch.Tensor) -> np.ndarray:
    """Newly mapped memory; NumPy advises huge pages, torch does not."""
    return np.empty(tensor.shape, tensor.numpy().dtype)


def copy_fresh_one(source: torch.Tensor) -> object:
    target = fresh(source)
    np.copyto(target, source.numpy())
    return target


def copy_fresh_all(source: torch.Tensor) -> object:
    return torch.from_numpy(fresh(source)).copy_(source)


def touch_fresh_all(source: torch.Tensor) -> object:
    return torch.from_numpy(fresh(source)).fill_(PAD)


def ceilings(output: torch.Tensor, mask: torch.Tensor | None) -> Variants:
    warm = torch.from_numpy(fresh(output)).fill_(1)
    found: Variants = {
        "copy to fresh, all threads": lambda: copy_fresh_all(output),
        "copy to fresh, one thread": lambda: copy_fresh_one(output),
        "copy to warm, all threads": lambda: warm.copy_(output),
        "fill fresh, all threads": lambda: touch_fresh_all(output),
    }
    if mask is not None:
        found["read the mask, all threads"] = mask.max
        found["read the mask, one thread"] = mask.numpy().max
    return found


# ---- sections -----------------------------------------------------------------------------------


def section(
    title: str,
    variants: Variants,
    output: torch.Tensor,
    args: argparse.Namespace,
    mask: torch.Tensor | None = None,
) -> common.Section:
    """`mask` is given where the kernel has to read it, too."""
    size = output.numel() * output.element_size()
    results = common.compare({**variants, **ceilings(output, mask)}, args, nbytes=size)
    found = common.Section(f"{title}, output {size / 1e6:.1f} MB", results, baseline="ours")
    medians = {result.name: result.median for result in results}
    ours = medians["ours"]

    def least(what: str) -> float:
        return min(time for name, time in medians.items() if name.startswith(what))

    floor = least("copy to fresh")
    floor_name = "the better copy to fresh memory"
    if mask is not None:
        floor += least("read the mask")
        floor_name += " + one read of the mask"
    if "torch rows" in medians:
        found.facts["row by row / ours"] = f"{medians['torch rows'] / ours:.1f}"
    found.facts[f"ours / ({floor_name})"] = f"{ours / floor:.2f}"
    return found


def pad_sections(b: Batch, title: str, args: argparse.Namespace) -> list[common.Section]:
    prompts = b.out[:, : b.prompt_width]
    responses = b.out[:, b.prompt_width :]
    lengths: Variants = {
        "ours": lambda: pad_ours(b),
        "torch rows": lambda: pad_rows(b),
        "torch scatter": lambda: pad_scatter(b),
    }
    masked: Variants = {
        "ours": lambda: arctic_rl_c.pad_prompt_response(
            b.nested, prompts, responses, b.mask, pad_value=PAD
        )
    }
    assert torch.equal(lengths["ours"]()[0], b.out)  # type: ignore[index]
    assert torch.equal(masked["ours"]()[0], b.out)  # type: ignore[index]
    assert torch.equal(pad_rows(b), b.out)
    return [
        section(f"pad_prompt_response {title}", lengths, b.out, args),
        section(f"pad_prompt_response {title}, lengths from the mask", masked, b.out, args, b.mask),
    ]


def left_pad_section(b: Batch, title: str, args: argparse.Namespace) -> common.Section:
    responses = b.out[:, b.prompt_width :].contiguous()
    width = b.prompt_width + b.response_width
    variants: Variants = {
        "ours": lambda: arctic_rl_c.left_pad(responses, width),
        "torch pad": lambda: F.pad(responses, (b.prompt_width, 0)),
    }
    assert torch.equal(variants["ours"](), variants["torch pad"]())  # type: ignore[arg-type]
    return section(f"left_pad {title}", variants, b.out, args)


def make_jagged_section(b: Batch, title: str, args: argparse.Namespace) -> common.Section:
    like = (b.values, b.offsets)
    nested = torch.nested.nested_tensor_from_jagged(*like)
    variants: Variants = {
        "ours": lambda: arctic_rl_c.make_jagged(b.out, b.mask, nested),
        "torch rows": lambda: unpad_rows(b),
        "torch gather": lambda: unpad_gather(b),
    }
    assert torch.equal(variants["ours"]().values(), b.values)  # type: ignore[attr-defined]
    assert torch.equal(unpad_rows(b), b.values)
    return section(f"make_jagged {title}", variants, b.values, args, b.mask)


def scaling_section(args: argparse.Namespace) -> common.Section:
    """The largest int64 batch by number of threads."""
    rows, prompt_width, response_width = SIZES[0] if args.quick else SIZES[-1]
    counts = [1]
    while counts[-1] * 2 <= common.cpu_count():
        counts.append(counts[-1] * 2)
    results = []
    for count in counts:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, "--one", "--json", file.name]
            command += ["--repeats", str(args.repeats)] + (["--quick"] if args.quick else [])
            environment = {**os.environ, "ARCTIC_RL_C_THREADS": str(count)}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            data = json.loads(file.read())
        found = data["sections"][0]["results"][0]
        results.append(common.Result(f"{count} threads", found["seconds"], found["nbytes"]))
    title = f"pad_prompt_response {rows} x ({prompt_width} + {response_width}) int64, by threads"
    return common.Section(title, results, baseline=results[-1].name)


def one_section(args: argparse.Namespace) -> common.Section:
    """What one process of the scaling section measures: ours alone."""
    b = make_batch(*(SIZES[0] if args.quick else SIZES[-1]), torch.int64)
    results = common.compare({"ours": lambda: pad_ours(b)}, args, nbytes=b.out.numel() * 8)
    return common.Section("ours", results, baseline="ours")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--pad-only", action="store_true", help="pad_prompt_response alone")
    parser.add_argument("--scaling", action="store_true", help="add times by number of threads")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        common.report("padding by threads", [one_section(args)], args)
        return
    sections = []
    for rows, prompt_width, response_width in SIZES[:1] if args.quick else SIZES:
        for dtype in DTYPES:
            batch = make_batch(rows, prompt_width, response_width, dtype)
            name = str(dtype).removeprefix("torch.")
            title = f"{rows} x ({prompt_width} + {response_width}) {name}"
            sections += pad_sections(batch, title, args)
            if not args.pad_only:
                sections.append(left_pad_section(batch, title, args))
                sections.append(make_jagged_section(batch, title, args))
    if args.scaling:
        sections.append(scaling_section(args))
    common.report("padding", sections, args)


if __name__ == "__main__":
    main()
