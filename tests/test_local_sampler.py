# SPDX-License-Identifier: Apache-2.0
"""The embedded sampler: generation against transformers, sampling, sleep and wake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_rl_c import TornWeightsError, WeightSender
from arctic_rl_c.local.model import build_model, load_tokenizer, weights_digest
from arctic_rl_c.local.options import ModelOptions, SamplerOptions
from arctic_rl_c.local.prefix_cache import PrefixCache
from arctic_rl_c.local.sampler import Sampler
from arctic_rl_c.local.sampling import SamplingParams, TokenChooser

MODEL = ModelOptions(shape="micro", seed=9)
PROMPTS = [[4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15], [3], [9, 9, 9, 9]]
EOS = 2


@pytest.fixture(autouse=True, scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model whose layers matter: as initialised, a small one repeats its last token."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small lose by being shared out
    directory = tmp_path_factory.mktemp("model")
    made = build_model(MODEL)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "layers" in name and param.dim() == 2:
                param *= 12.0
    made.save_pretrained(directory)
    load_tokenizer(MODEL).save_pretrained(directory)
    MODEL.path = str(directory)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(MODEL)


def new_sampler(**options: Any) -> Sampler:
    return Sampler(MODEL, SamplerOptions(**options))


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    made = new_sampler()
    yield made
    made.close()


def run(sampler: Sampler, prompts: Any, **params: Any) -> list[dict[str, Any]]:
    return sampler.generate(prompts, {"max_tokens": 12, **params})["results"]


def tokens(sampler: Sampler, prompts: Any, **params: Any) -> list[list[int]]:
    return [r["token_ids"] for r in run(sampler, prompts, **params)]


def hf_greedy(model: Any, prompt: list[int], count: int, **kwargs: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **kwargs
    )
    return out[0, len(prompt) :].tolist()


# -- generation ----------------------------------------------------------------------------------


def test_greedy_equals_transformers(sampler: Sampler, model: Any) -> None:
    wanted = [hf_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert tokens(sampler, PROMPTS) == wanted
    assert [tokens(sampler, [p])[0] for p in PROMPTS] == wanted  # one by one, prefixes cached
    small = new_sampler(max_num_seqs=3, prefix_cache_tokens=0)
    assert tokens(small, PROMPTS) == wanted


def test_repetition_penalty_equals_transformers(sampler: Sampler, model: Any) -> None:
    wanted = [hf_greedy(model, p, 12, repetition_penalty=1.3) for p in PROMPTS]
    assert tokens(sampler, PROMPTS, repetition_penalty=1.3) == wanted
    assert wanted != tokens(sampler, PROMPTS) and len({t for w in wanted for t in w}) > 8


def test_results_say_everything(sampler: Sampler) -> None:
    tokenizer = load_tokenizer(MODEL)
    by_ids, by_text = run(sampler, [[4, 13, 5], "1+2"])
    assert by_ids == {**by_text, "prefix_cache_len": by_ids["prefix_cache_len"]}
    assert by_ids["text"] == tokenizer.decode(by_ids["token_ids"], skip_special_tokens=True)
    assert by_ids["prompt_token_ids"] == [4, 13, 5] and by_ids["prompt_len"] == 3
    assert by_ids["generation_len"] == len(by_ids["token_ids"])
    assert by_ids["weight_version_start"] == by_ids["weight_version_end"] == 0
    assert "logprobs" not in by_ids and "samples" not in by_ids


def test_one_prompt_of_ids_or_text(sampler: Sampler) -> None:
    assert tokens(sampler, [4, 13, 5]) == tokens(sampler, "1+2")
    assert run(sampler, []) == []


def test_special_ids_pass_untouched(sampler: Sampler, model: Any) -> None:
    prompt = [1, 1, 5, EOS, 6]
    result = run(sampler, [prompt])[0]
    assert result["prompt_token_ids"] == prompt
    assert result["token_ids"] == hf_greedy(model, prompt, 12)


def test_stop_ids_and_end_of_sequence(sampler: Sampler) -> None:
    free = run(sampler, PROMPTS, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    ended = run(sampler, PROMPTS, temperature=1.0, seed=3, max_tokens=40)
    assert any(r["finish_reason"] == "stop" for r in ended)
    for whole, cut in zip(free, ended, strict=True):
        assert whole["generation_len"] == 40 and whole["finish_reason"] == "length"
        if cut["finish_reason"] == "stop":
            assert cut["token_ids"][-1] == EOS and EOS not in cut["token_ids"][:-1]
        assert whole["token_ids"][: cut["generation_len"]] == cut["token_ids"]
    stop = free[0]["token_ids"][4]
    stopped = run(
        sampler,
        PROMPTS[:1],
        temperature=1.0,
        seed=3,
        max_tokens=40,
        ignore_eos=True,
        stop_token_ids=[stop],
    )[0]
    first = free[0]["token_ids"].index(stop)
    assert stopped["token_ids"] == free[0]["token_ids"][: first + 1]
    assert stopped["finish_reason"] == "stop"


def test_min_tokens_hold_back_the_end(sampler: Sampler) -> None:
    for result in run(sampler, PROMPTS * 4, temperature=1.0, min_tokens=9, seed=1):
        assert EOS not in result["token_ids"][:9] and result["generation_len"] >= 9


def test_length_limits() -> None:
    sampler = new_sampler(max_model_len=8)
    result = run(sampler, [[5] * 6], max_tokens=100, ignore_eos=True)[0]
    assert result["generation_len"] == 2 and result["finish_reason"] == "length"
    assert run(sampler, [[5] * 6], max_tokens=None, ignore_eos=True)[0] == {
        **result,
        "prefix_cache_len": 5,
    }
    for length in (8, 9):
        with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens .* limit is 8"):
            run(sampler, [[5], [5] * length])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[3], [20]], {}, "prompt 1 holds the id 20, the vocabulary ends at 20"),
        ([[-1]], {}, "prompt 0 holds the id -1"),
        ([[3]], {"max_tokens": 0}, "max_tokens must be at least 1, found 0"),
        ([[3]], {"temperature": -1.0}, "temperature must be at least 0"),
        ([[3]], {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ([[3]], {"top_k": -2}, "top_k must be"),
        ([[3]], {"n": 0}, "n must be at least 1"),
        ([[3]], {"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ([[3]], {"logprobs": 65}, "logprobs must be None or between"),
        ([[3]], {"allowed_token_ids": []}, "allowed_token_ids must be"),
        ([[3]], {"presence_penalty": 1}, "'presence_penalty' is not known; there are temperature"),
    ],
)
def test_bad_requests(sampler: Sampler, prompts: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(sampler, prompts, **params)


# -- sampling ------------------------------------------------------------------------------------


def test_a_seed_repeats_however_it_is_batched(sampler: Sampler) -> None:
    wanted = tokens(sampler, PROMPTS, temperature=1.0, seed=11)
    assert tokens(sampler, PROMPTS, temperature=1.0, seed=11) == wanted
    assert tokens(new_sampler(max_num_seqs=1), PROMPTS, temperature=1.0, seed=11) == wanted
    assert tokens(sampler, PROMPTS, temperature=1.0, seed=12) != wanted


def test_a_share_of_a_request_is_made_as_in_the_whole(sampler: Sampler) -> None:
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 11}
    whole = sampler.generate([[4, 5]] * 4, params)["results"]
    share = sampler.generate([[4, 5]] * 2, params, numbers=[3, 1])["results"]
    assert [r["token_ids"] for r in share] == [whole[3]["token_ids"], whole[1]["token_ids"]]
    assert whole[0]["token_ids"] != whole[1]["token_ids"]
    with pytest.raises(ValueError, match="prompt 5 is empty"):
        sampler.generate([[]], params, numbers=[5])


def test_without_a_seed_the_engine_repeats() -> None:
    first, second = new_sampler(seed=1), new_sampler(seed=1)
    runs = [tokens(first, PROMPTS, temperature=1.0) for _ in range(2)]
    assert runs[0] != runs[1]
    assert [tokens(second, PROMPTS, temperature=1.0) for _ in range(2)] == runs


def test_n_samples(sampler: Sampler) -> None:
    results = run(sampler, PROMPTS, n=3, temperature=1.0, seed=5)
    assert len(results) == len(PROMPTS)
    for result in results:
        samples = result["samples"]
        assert len(samples) == 3 and samples[0]["token_ids"] == result["token_ids"]
    assert any(len({tuple(s["token_ids"]) for s in result["samples"]}) > 1 for result in results)


def test_logprobs_are_the_models_own(sampler: Sampler, model: Any) -> None:
    prompt = PROMPTS[0]
    result = run(sampler, [prompt], temperature=0.5, top_k=5, logprobs=3, seed=2)[0]
    ids = torch.tensor([prompt + result["token_ids"]])
    wanted = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(result["logprobs"]) == result["generation_len"]
    for position, (token, report) in enumerate(
        zip(result["token_ids"], result["logprobs"], strict=True)
    ):
        order = wanted[position].argsort(descending=True).tolist()
        assert set(report) == {token, *order[:3]}
        for other, entry in report.items():
            assert entry["logprob"] == pytest.approx(float(wanted[position, other]), abs=1e-4)
            assert entry["rank"] == order.index(other) + 1
    chosen_only = run(sampler, [prompt], logprobs=0)[0]
    assert [list(r) for r in chosen_only["logprobs"]] == [[t] for t in chosen_only["token_ids"]]


def choose(logits: torch.Tensor, uniforms: torch.Tensor, **params: Any) -> torch.Tensor:
    chooser = TokenChooser(
        SamplingParams.from_mapping(params),
        logits.shape[1],
        [[0]] * len(logits),
        torch.device("cpu"),
    )
    return chooser.choose(logits, uniforms)


def test_none_is_as_if_nothing_was_given() -> None:
    given = dict.fromkeys(SamplingParams.__dataclass_fields__)
    assert SamplingParams.from_mapping(given) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_mapping({"stop": None}) == SamplingParams()
    with pytest.raises(ValueError, match="'stop' is not known"):
        SamplingParams.from_mapping({"stop": "x"})


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    count = 4000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    rows = logits.expand(count, -1)

    def shares(**params: Any) -> list[float]:
        counts = Counter(choose(rows, uniforms, **params).tolist())
        return [counts[i] / count for i in range(4)]

    assert shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-3)
    sharp = torch.tensor([0.5, 0.3, 0.15, 0.05]).square()
    wanted = (sharp / sharp.sum()).tolist()
    assert shares(temperature=0.5) == pytest.approx(wanted, abs=1e-3)
    assert shares(temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)
    assert shares(temperature=1.0, top_p=0.75) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)
    assert shares(temperature=1.0, top_p=0.4) == [1.0, 0, 0, 0]
    assert shares(temperature=1.0, allowed_token_ids=[2, 3]) == pytest.approx(
        [0, 0, 0.75, 0.25], abs=1e-3
    )
    assert shares() == [1.0, 0, 0, 0]


@settings(max_examples=50)
@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 4),
    st.floats(0.01, 1),
    st.integers(0, 12),
)
def test_what_is_drawn_was_allowed(
    scores: list[float], uniform: float, temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.tensor([scores])
    token = int(
        choose(
            logits,
            torch.tensor([uniform], dtype=torch.float64),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
    )
    probs = torch.softmax(logits[0] / temperature, -1)
    above = [float(p) for p in probs if p > probs[token]]
    assert probs[token] > 0
    assert sum(above) < top_p + 1e-5
    assert top_k == 0 or len(above) < top_k


# -- prefix cache --------------------------------------------------------------------------------


def test_prefixes_are_reused_until_reset(sampler: Sampler, model: Any) -> None:
    long = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    longer = [*long, 14, 15, 16, 3, 4]
    assert run(sampler, [long])[0]["prefix_cache_len"] == 0
    again, beyond, other = run(sampler, [long, longer, PROMPTS[0]])
    assert again["prefix_cache_len"] == 9  # one token is always computed
    assert beyond["prefix_cache_len"] == 8  # whole blocks of another prompt
    assert other["prefix_cache_len"] == 0
    for prompt, result in ((long, again), (longer, beyond), (PROMPTS[0], other)):
        assert result["token_ids"] == hf_greedy(model, prompt, 12)
    assert sampler.reset_prefix_cache() == {"status": "ok", "entries": 3}
    assert run(sampler, [long])[0]["prefix_cache_len"] == 0


def test_prefix_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = PrefixCache(20)
    for first in range(4):
        cache.add([first] * 8, [(torch.zeros(1, 8, 1), torch.zeros(1, 8, 1))])
    assert len(cache) == 2 and cache.tokens == 16
    assert cache.find([1] * 8)[0] == 0 and cache.find([3] * 8)[0] == 7
    assert cache.find([3] * 9)[0] == 8
    cache.add([5] * 21, [])  # never fits
    assert len(cache) == 2
    cache.find([2] * 8)  # now the younger one
    cache.add([6] * 8, [(torch.zeros(1, 8, 1), torch.zeros(1, 8, 1))])
    assert cache.find([2] * 9)[0] == 8 and cache.find([3] * 9)[0] == 0
    assert cache.reset() == 2 and cache.tokens == 0 and cache.find([2] * 9) == (0, [])


# -- sleep, wake, weights ------------------------------------------------------------------------


def test_sleep_and_wake_states(sampler: Sampler) -> None:
    expected = tokens(sampler, PROMPTS)
    assert sampler.wake()["status"] == "already_ready"
    assert sampler.sleep(1) == {"status": "sleeping", "level": 1, "workers": 1}
    assert sampler.sleep(2)["status"] == "already_sleeping"
    with pytest.raises(RuntimeError, match="Model is sleeping; call wake_inference first"):
        run(sampler, PROMPTS)
    with pytest.raises(RuntimeError, match="kv_cache cannot wake before weights"):
        sampler.wake(["kv_cache"])
    assert sampler.wake(["weights"])["status"] == "weights_ready"
    assert sampler.wake(["weights"])["status"] == "already_weights_ready"
    with pytest.raises(RuntimeError, match="kv_cache is not; call"):
        run(sampler, PROMPTS)
    assert sampler.wake(["kv_cache"])["status"] == "ready"
    assert tokens(sampler, PROMPTS) == expected
    assert run(sampler, PROMPTS)[0]["prefix_cache_len"] == 2


@pytest.mark.parametrize("tags", [["weights", "cache"], []])
def test_unknown_tags(sampler: Sampler, tags: list[str]) -> None:
    sampler.sleep()
    with pytest.raises(ValueError, match="wake tags must be among weights, kv_cache"):
        sampler.wake(tags)
    with pytest.raises(ValueError, match="sleep level must be 1 or 2, found 3"):
        sampler.sleep(3)


def sync(sampler: Sampler, source: Any) -> dict[str, Any]:
    with WeightSender(source.named_parameters()) as sender:
        return sampler.pull_weights(sender.offer(), timeout=10.0)


def test_deep_sleep_loses_the_weights_until_a_sync(sampler: Sampler) -> None:
    source = build_model(ModelOptions(shape="micro", seed=77))
    sampler.sleep(2)
    sampler.wake()
    with pytest.raises(TornWeightsError, match=r"sleep level 2 dropped the weights.*sync_weights"):
        run(sampler, PROMPTS)
    stats = sync(sampler, source)
    assert stats["transport"] == "host_shm" and stats["tensors"] == 24
    assert "[weight-sync names validated]" in stats["names_line"]
    assert weights_digest(source) == sampler.weights_digest()["digest"]
    assert tokens(sampler, PROMPTS) == [hf_greedy(source, p, 12) for p in PROMPTS]
    assert run(sampler, PROMPTS)[0]["weight_version_start"] == 1


def test_dummy_weights_wait_for_a_sync(model: Any) -> None:
    sampler = new_sampler(load_format="dummy")
    assert sampler.weights_digest()["digest"] != weights_digest(model)
    with pytest.raises(TornWeightsError, match="started with dummy weights"):
        run(sampler, PROMPTS)
    sync(sampler, model)
    assert tokens(sampler, PROMPTS) == [hf_greedy(model, p, 12) for p in PROMPTS]
    sampler.close()


def test_a_sync_empties_the_prefix_cache_and_keeps_addresses(sampler: Sampler) -> None:
    run(sampler, PROMPTS)
    addresses = [p.data_ptr() for p in sampler._model.parameters()]
    sync(sampler, build_model(ModelOptions(shape="micro", seed=78)))
    assert [p.data_ptr() for p in sampler._model.parameters()] == addresses
    assert run(sampler, PROMPTS)[1]["prefix_cache_len"] == 0


def test_weights_cannot_be_pulled_asleep(sampler: Sampler, model: Any) -> None:
    sampler.sleep(2)
    with pytest.raises(RuntimeError, match="weights are asleep"):
        sync(sampler, model)


def test_weights_marked_torn(sampler: Sampler, model: Any) -> None:
    sampler.mark_torn("the digests differ")
    with pytest.raises(TornWeightsError, match="the digests differ"):
        run(sampler, PROMPTS)
    sync(sampler, model)
    assert run(sampler, PROMPTS)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_model_len 4096 exceeds the model's own 128"):
        new_sampler(max_model_len=4096)
    with pytest.raises(ValueError, match="load_format 'lazy'"):
        new_sampler(load_format="lazy")


def test_ids_beyond_the_tokenizer_are_reported(tmp_path: Any) -> None:
    wide = build_model(MODEL)
    wide.resize_token_embeddings(24, mean_resizing=False)
    with torch.no_grad():
        wide.get_input_embeddings().weight[20:] *= 50
    wide.save_pretrained(tmp_path)
    load_tokenizer(MODEL).save_pretrained(tmp_path)
    sampler = Sampler(ModelOptions(path=str(tmp_path)), SamplerOptions())
    result = run(sampler, PROMPTS * 4, temperature=1.0, seed=0, max_tokens=30)
    odd = [r for r in result if "unknown_token_positions" in r]
    assert odd and all(r["token_ids"][i] >= 20 for r in odd for i in r["unknown_token_positions"])
    only = run(sampler, PROMPTS, temperature=1.0, allowed_token_ids=list(range(20)))
    assert not any("unknown_token_positions" in r for r in only)
    sampler.close()
