# SPDX-License-Identifier: Apache-2.0
"""A task for verl that needs no download: sums, a reward, and a model of 0.1 M parameters.

    python examples/verl_arithmetic.py FOLDER     writes FOLDER/model, train.parquet, test.parquet;
                                                  FOLDER/stand_in is one for PYTHONPATH

Needs pyarrow, which comes with verl. The parquet files have the columns of verl's own GSM8K ones.
This file is the reward function too:
`custom_reward_function.path=examples/verl_arithmetic.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

DATA_SOURCE = "arctic_rl_c/arithmetic"

#: Messages are concatenated as they are: the model's vocabulary has single characters.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

#: verl 0.7 takes four row-packing helpers from flash_attn, which has no CPU build. verl has them
#: in plain torch too, for another accelerator.
FLASH_ATTN = """\
from verl.utils.npu_flash_attn_utils import (  # noqa: F401
    index_first_axis, pad_input, rearrange, unpad_input,
)
"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Give verl a reward: from 0 to 1, half of it for the right number."""
    from arctic_rl_c.local.tasks import Arithmetic, Problem

    text = solution_str.removesuffix("<eos>")
    # A response that came to its own end is shorter than the limit, in this task always.
    return Arithmetic().reward(Problem("", ground_truth), text, ended=len(text) < 4)


def rows(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Problems in the form of verl's GSM8K parquet files."""
    from arctic_rl_c.local.tasks import Arithmetic

    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(Arithmetic(seed=seed).sample(count))
    ]


def write(folder: Path, *, train: int = 1024, test: int = 64) -> None:
    """Write the model and both data files."""
    import pyarrow
    import pyarrow.parquet

    from arctic_rl_c.local.model import build_model, load_tokenizer
    from arctic_rl_c.local.options import ModelOptions

    folder.mkdir(parents=True, exist_ok=True)
    options = ModelOptions(shape="tiny")
    tokenizer = load_tokenizer(options)
    tokenizer.chat_template = CHAT_TEMPLATE
    build_model(options).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, count, seed in (("train", train, 0), ("test", test, 1)):
        table = pyarrow.Table.from_pylist(rows(count, seed, split))
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


def write_stand_in(folder: Path) -> None:
    """Write what verl wants of flash_attn, unless that is installed: then an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("flash_attn") is not None:
        return
    package = folder / "flash_attn"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "bert_padding.py").write_text(FLASH_ATTN)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
    write_stand_in(Path(sys.argv[1]) / "stand_in")
