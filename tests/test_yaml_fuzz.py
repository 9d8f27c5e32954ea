# SPDX-License-Identifier: Apache-2.0
"""The configuration reader under sanitizers, against mutated text; see fuzz/fuzz_yaml.c. And the
extension itself, which must give data or an error for whatever it is handed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import fuzzing
import golden
import test_config_override
import test_yaml
import test_yaml_interpolation
from arctic_rl_c import ConfigError, load_config, load_yaml

READER = ["tree", "literal", "yaml", "expr", "interp", "override", "json", "text", "status"]
SCHEMA = ["config", "config_schema", "config_suggest", "config_check", "config_warn"]
ROUNDS = 30_000


def documents() -> list[str]:
    expressions = test_yaml_interpolation.EXPRESSIONS.strip().split("\n")
    return [
        *test_yaml.DOCUMENTS,
        *test_yaml.REFUSED,
        *test_yaml_interpolation.REFUSED,
        *(test_yaml_interpolation.document(expression) for expression in expressions),
        *(json.dumps(case.config) for case in (golden.CASES[0], golden.CASES[-1])),
    ]


def overrides() -> list[str]:
    return [
        *test_config_override.REFUSED,
        *(f"+zz={value}" for value in test_config_override.CASES),
    ]


def test_mutated_documents(tmp_path: Path) -> None:
    target = fuzzing.build(tmp_path, "fuzz_yaml", READER + SCHEMA, fuzzing.libyaml_flags())
    inputs = documents() + [f"{test_config_override.FILE}\x1e{text}" for text in overrides()]
    fuzzing.run(target, ROUNDS, [text.encode() for text in inputs])


def mutated(text: str, others: list[str], pick: random.Random) -> str:
    for _ in range(pick.randint(1, 4)):
        at, length = pick.randint(0, len(text)), pick.randint(0, 12)
        other = pick.choice(others)
        start = pick.randint(0, len(other))
        new = pick.choice(["", chr(pick.randrange(1, 0x250)), other[start : start + length]])
        text = text[:at] + new + text[at + pick.choice([0, 1, length]) :]
    return text


def test_mutated_text_through_the_extension() -> None:
    pick = random.Random(20)
    texts, options = documents(), overrides()
    accepted = refused = 0
    for _ in range(20_000):
        text = mutated(pick.choice(texts), texts, pick)
        option = mutated(pick.choice(options), options, pick)
        for call in (
            lambda text=text: load_yaml(text=text),
            lambda text=text, option=option: load_config(text=text, overrides=[option]),
        ):
            try:
                call()
            except ConfigError as error:
                assert error.args[0]
                refused += 1
            else:
                accepted += 1
    assert accepted > 2000
    assert refused > 2000
