# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace


def hf_tokenizer(path, trust_remote_code=False):
    return SimpleNamespace(pad_token_id=None, eos_token_id=2)
