# SPDX-License-Identifier: Apache-2.0
"""How far the batch kernels are from the machine's own copy, and from doing it row by row.

Each section is one kernel, one size and one dtype. Competitors: the per-row way (slice, pad,
cat, stack, with `.item()` for every length, as Python adapters do it), and one masked scatter
for the whole batch in torch. Ceilings: a copy of the output into fresh memory, by one thread and
by all, a copy into memory that is already mapped, and the first touch of fresh memory alone.
"Fresh" means newly mapped for each run, with huge pages advised, as the kernels' outputs are.

Prompts and responses have uniform lengths from an eighth of their width up, so a little under
half of the output is padding. GB/s counts the bytes of the output once.
"""

from __future__ import annotations

import argparse
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


def ceilings(output: torch.Tensor) -> Variants:
    warm = torch.from_numpy(fresh(output)).fill_(1)
    return {
        "copy to fresh, all threads": lambda: copy_fresh_all(output),
        "copy to fresh, one thread": lambda: copy_fresh_one(output),
        "copy to warm, all threads": lambda: warm.copy_(output),
        "fill fresh, all threads": lambda: touch_fresh_all(output),
    }


# ---- sections -----------------------------------------------------------------------------------


def section(
    title: str, variants: Variants, output: torch.Tensor, args: argparse.Namespace
) -> common.Section:
    size = output.numel() * output.element_size()
    results = common.compare({**variants, **ceilings(output)}, args, nbytes=size)
    found = common.Section(f"{title}, output {size / 2**20:.0f} MiB", results, baseline="ours")
    copies = [r.median for r in results if r.name.startswith("copy to fresh")]
    slow = [r.median for r in results if r.name.endswith("rows")]
    if slow:
        found.facts["faster than row by row"] = f"{slow[0] / results[0].median:.1f} x"
    found.facts["time over the better copy to fresh memory"] = (
        f"{results[0].median / min(copies):.2f} x"
    )
    return found


def pad_sections(b: Batch, title: str, args: argparse.Namespace) -> list[common.Section]:
    prompts = b.out[:, : b.prompt_width]
    responses = b.out[:, b.prompt_width :]
    lengths: Variants = {
        "ours": lambda: arctic_rl_c.pad_prompt_response(
            b.nested,
            b.prompts,
            b.responses,
            pad_value=PAD,
            prompt_width=b.prompt_width,
            response_width=b.response_width,
        ),
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
        section(f"pad_prompt_response {title}, lengths from the mask", masked, b.out, args),
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
    return section(f"make_jagged {title}", variants, b.values, args)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--pad-only", action="store_true", help="pad_prompt_response alone")
    args = parser.parse_args()
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
    common.report("padding", sections, args)


if __name__ == "__main__":
    main()
