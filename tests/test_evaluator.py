import multiprocessing
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.decoding import Decoding, TokenTree
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, L2Norm, SnapKV, StreamingLLM, attach
from mosaic_opt.eviction.attention import attention_switched
from mosaic_opt.model import ModelSource
from mosaic_opt.prefill import Prefiller
from mosaic_opt.ranked import place
from mosaic_opt.tasks import Needle, ruler
from tests.conftest import EVERY_METHOD, METHODS, RandomTokens, tiny_llama, tiny_qwen3

METHOD = SnapKV(window=8)
LENGTHS = (5, 40, 60, 60, 71)


def make(model, tokenizer, *, lengths=LENGTHS, count=11, new_tokens=16, of_task=None, **arguments):
    task = RandomTokens(lengths, new_tokens=new_tokens, **of_task or {})
    examples = task.examples(tokenizer, "test", count)
    return Evaluator(
        model=model, tokenizer=tokenizer, task=task, examples=examples,
        **{"method": METHOD, "batch_size": 4, **arguments},
    )  # fmt: skip


@torch.inference_mode()
def decoded(evaluator, allocation):
    """Output tokens of every example, as the evaluator finds them."""
    tokens = {}
    with attention_switched(evaluator.model):
        for batch in evaluator.batches:
            outputs, _ = Decoding(evaluator.model, batch, evaluator._applied(allocation)).run()
            tokens.update(zip(batch.indices, outputs, strict=True))
    return [tokens[index] for index in range(len(tokens))]


def live(model, example, allocation, new_tokens, method=METHOD):
    """Tokens of plain generation with the eviction attached, and the logits of each step."""
    prompt = torch.tensor([[*example.tokens, *example.question]])
    stops = {*example.stop_tokens, *np.atleast_1d(model.generation_config.eos_token_id or [])}
    options = {"eos_token_id": sorted(stops), "min_new_tokens": 1} if example.stop_tokens else {}
    with torch.no_grad(), attach(model, method, allocation):
        cache = model(torch.tensor([example.tokens])).cache if example.question else None
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, cache=cache,
            output_logits=True, return_dict_in_generate=True, **options,
        )  # fmt: skip
    return made.sequences[0, prompt.shape[1] :].tolist(), made.logits


def allocations(layers, count, *, most=75, seed=0):
    rng = np.random.default_rng(seed)
    return [uniform(layers, most), *(Allocation(rng.integers(1, most, size=layers)) for _ in range(count))]


@EVERY_METHOD
@pytest.mark.parametrize("make_model", [tiny_llama, tiny_qwen3])
def test_tokens_are_those_of_the_live_model(byte_tokenizer, make_model, method):
    model = make_model(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, method=method, count=5)
    different = 0
    for allocation in allocations(4, 3):
        outputs = decoded(evaluator, allocation)
        for example, output in zip(evaluator.examples, outputs, strict=True):
            assert output == live(model, example, allocation, 16, method)[0]
        different += sum(output != draft for output, draft in zip(outputs, evaluator.drafts, strict=True))
    assert different > 5  # eviction changed what is compared
    assert decoded(evaluator, uniform(4, 71)) == evaluator.drafts  # a whole cache is the plain model


@pytest.mark.parametrize("method", [SnapKV(window=8), AdaKV(window=8)], ids=["snapkv", "adakv"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)])
def test_tokens_with_any_number_of_query_heads_a_kv_head(byte_tokenizer, heads, method):
    model = tiny_llama(heads=heads[0], kv_heads=heads[1], dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, method=method)
    for allocation in allocations(4, 3):
        for example, output in zip(evaluator.examples, decoded(evaluator, allocation), strict=True):
            assert output == live(model, example, allocation, 16, method)[0]


QUESTIONS = {
    "questions": {"questions": (3, 1, 9)},
    "some questions": {"questions": (0, 6)},
    "limits": {"limits": (3, 16, 1)},
    "stops": {"stop_tokens": range(0, 256, 3)},
    "all": {"questions": (4, 0, 2), "limits": (16, 5), "stop_tokens": range(0, 256, 2)},
}


@pytest.mark.parametrize("of_task", QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("method", [SnapKV(window=8), AdaKV(window=8)], ids=["snapkv", "adakv"])
def test_tokens_with_questions_after_the_prompt_and_limits_and_stops_of_their_own(byte_tokenizer, of_task, method):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, method=method, of_task=of_task)
    different = 0
    for allocation in allocations(4, 3):
        for example, output, draft in zip(
            evaluator.examples, decoded(evaluator, allocation), evaluator.drafts, strict=True
        ):
            assert output == live(model, example, allocation, example.new_tokens, method)[0]
            different += output != draft
    assert different > 5
    assert decoded(evaluator, uniform(4, 71)) == evaluator.drafts
    lengths = {len(output) for output in decoded(evaluator, uniform(4, 9))}
    assert len(lengths) > 1 or "questions" in of_task


def test_the_first_token_depends_on_the_allocation_where_a_question_follows(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, of_task={"questions": (5,)})
    outputs = [decoded(evaluator, uniform(4, budget)) for budget in (8, 71)]
    assert [output[0] for output in outputs[0]] != [output[0] for output in outputs[1]]


def test_the_draft_is_plain_generation_and_a_whole_cache_repeats_it(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer)
    for example, draft in zip(evaluator.examples, evaluator.drafts, strict=True):
        prompt = torch.tensor([example.tokens])
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
        assert draft == plain[0, prompt.shape[1] :].tolist()
    assert decoded(evaluator, uniform(4, 71)) == evaluator.drafts
    assert evaluator.evaluate(uniform(4, 71)).scores == evaluator.full_scores()


@pytest.mark.parametrize("new_tokens", [1, 2, 40])
def test_odd_generation_limits(byte_tokenizer, new_tokens):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, new_tokens=new_tokens)
    allocation = Allocation([9, 30, 12, 50])
    for example, output in zip(evaluator.examples, decoded(evaluator, allocation), strict=True):
        assert output == live(model, example, allocation, new_tokens)[0]


@pytest.mark.parametrize("questions", [(0,), (3, 0, 1)])
def test_log_likelihood_is_that_of_the_best_reference(byte_tokenizer, questions):
    """Of all its tokens where a question follows the prompt, else of all but the first."""
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer, of_task={"questions": questions})
    allocation = Allocation([9, 30, 12, 50])
    measured = evaluator.evaluate(allocation)
    for example, found in zip(evaluator.examples, measured.log_likelihoods, strict=True):
        expected = []
        for reference in example.answer_tokens:
            with torch.no_grad(), attach(model, METHOD, allocation):
                cache = model(torch.tensor([example.tokens])).cache
                logits = model(torch.tensor([[*example.question, *reference[:-1]]]), cache=cache).logits[0]
            wanted = reference if example.question else reference[1:]
            steps = torch.log_softmax(logits.float(), dim=-1)[-len(wanted) :]
            expected.append(sum(float(steps[i, token]) for i, token in enumerate(wanted)))
        assert found == pytest.approx(max(expected), abs=1e-4)


def test_scores_are_told_between_batches_and_a_measurement_can_be_ended(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator, told = make(model, byte_tokenizer, batch_size=2), []
    allocation = Allocation([9, 30, 12, 50])
    measured = evaluator.evaluate(allocation, after_batch=lambda scores: told.append(dict(scores)))
    assert measured.scores == evaluator.evaluate(allocation).scores
    assert len(told) == (len(evaluator.examples) - 1) // 2
    assert [len(scores) for scores in told] == [2 * batch for batch in range(1, len(told) + 1)]
    assert all(measured.scores[index] == score for scores in told for index, score in scores.items())
    with pytest.raises(TimeoutError):
        evaluator.evaluate(allocation, after_batch=lambda scores: (_ for _ in ()).throw(TimeoutError))
    assert evaluator.evaluate(allocation).scores == measured.scores


def test_smollm2_tokens_are_those_of_the_live_model(smollm2, tmp_path):
    source, model = smollm2
    task = Needle(name="niah_single_2", haystack="essay", keys=1, tokens=400)
    examples = task.examples(source.tokenizer, "test", 2)
    rng = np.random.default_rng(0)
    several = [uniform(30, 96), Allocation(rng.choice([32, 64, 128, 400], size=30))]
    methods = [SnapKV(), AdaKV(), H2O(), L2Norm(), KeyDiff(), TOVA(), StreamingLLM(), ExpectedAttention()]
    prefilled = []
    for method in methods:
        evaluator = Evaluator(
            model=model, tokenizer=source.tokenizer, task=task, examples=examples, method=method,
            prefill_for=methods, store=tmp_path, progress=lambda done, total: prefilled.append(done),
        )  # fmt: skip
        for example, allocation in enumerate(several):
            expected, logits = live(model, examples[example], allocation, task.new_tokens, method)
            assert_alike(decoded(evaluator, allocation)[example], expected, logits)
        assert decoded(evaluator, uniform(30, 400)) == evaluator.drafts
    assert prefilled == [0, 2, *[2] * 7]  # once for all methods


def assert_alike(output, expected, logits):
    """The same tokens; where they part, the two logits tie within 1e-4."""
    if output != expected:
        step = next(i for i, pair in enumerate(zip(output, expected, strict=False)) if pair[0] != pair[1])
        gap = logits[step][0, output[step]] - logits[step][0, expected[step]]
        assert abs(float(gap)) <= 1e-4
        print(f"tie at step {step}")


def test_outputs_cut_where_the_score_is_settled_score_the_same(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer)
    for example, draft in zip(evaluator.examples, evaluator.drafts, strict=True):
        text = evaluator.text(draft)  # a reference that some outputs contain, some begin, some miss
        plain = [part for part in (text[i : i + 2] for i in range(len(text))) if part.isascii() and part.isalnum()]
        object.__setattr__(example, "references", (plain[0] if plain else "zz",))
    evaluator.task.score = lambda text, example: ruler.score("niah_single_1", text, example.references)
    evaluator.task.settled = lambda text, example, reach: ruler.settled(text, example.references, reach)
    shorter, found = 0, 0.0
    for allocation in allocations(4, 6):
        whole, cut = (evaluator.evaluate(allocation, complete=complete) for complete in (True, False))
        assert cut.scores == whole.scores
        assert cut.log_likelihoods == pytest.approx(whole.log_likelihoods, abs=1e-9)
        assert all(long.startswith(short) for long, short in zip(whole.outputs, cut.outputs, strict=True))
        found += sum(whole.scores)
        shorter += sum(len(a) > len(b) for a, b in zip(whole.outputs, cut.outputs, strict=True))
    assert 0 < found < 7 * 11
    assert shorter > 0


def test_a_token_supplies_no_more_of_a_reference_than_its_longest_piece(smollm2, byte_tokenizer, model):
    source, large = smollm2
    task = Needle(name="niah_single_2", haystack="essay", keys=1, tokens=200)
    examples = task.examples(source.tokenizer, "test", 1)
    evaluator = Evaluator(model=large, tokenizer=source.tokenizer, task=task, examples=examples, method=SnapKV())
    assert evaluator._most_per_token("1234567") == 1  # SmolLM2 tokenises digit by digit
    assert evaluator._most_per_token("house") == 5
    assert evaluator._most_per_token("two words") == float("inf")
    assert make(model, byte_tokenizer)._most_per_token("House") == 1


def test_measurement_numbers(byte_tokenizer, model):
    evaluator = make(model, byte_tokenizer)
    measured = evaluator.evaluate(Allocation([8, 20, 50, 71]))
    assert measured.mean_budget == 149 / 4
    realised = [sum(min(b, len(e.tokens)) for b in (8, 20, 50, 71)) for e in evaluator.examples]
    assert measured.realised_mean == pytest.approx(np.mean(realised) / 4)
    assert measured.kv_bytes == round(np.mean(realised) * 2 * 2 * 8 * 4)
    assert len(measured.scores) == len(measured.log_likelihoods) == len(measured.outputs) == 11
    assert measured.score == np.mean(measured.scores)


def test_references_of_one_token_or_none_have_no_likelihood(byte_tokenizer, model):
    evaluator = make(model, byte_tokenizer)
    for batch in evaluator.batches:
        for row, turn in enumerate(batch.turns):
            turn.references[:] = [(7,)] if row % 2 else []
    assert set(evaluator.evaluate(uniform(4, 9)).log_likelihoods) == {0.0}


def test_references_of_one_token_do_not_hide_longer_ones(byte_tokenizer, model):
    evaluator = make(model, byte_tokenizer)
    longer = evaluator.evaluate(uniform(4, 9)).log_likelihoods
    for batch in evaluator.batches:
        for turn in batch.turns:
            turn.references.append((7,))
    assert evaluator.evaluate(uniform(4, 9)).log_likelihoods == pytest.approx(longer)


def test_batching_changes_nothing(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    allocation = Allocation([9, 30, 12, 50])
    small, large = (make(model, byte_tokenizer, batch_size=size).evaluate(allocation) for size in (1, 64))
    assert small.outputs == large.outputs
    assert small.log_likelihoods == pytest.approx(large.log_likelihoods, abs=1e-6)


@contextmanager
def device_for(model, examples):
    """A device whose memory is too small for more than so many examples at a time."""

    def full(module, arguments, keywords):
        if (arguments[0] if arguments else keywords["input_ids"]).shape[0] > examples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails follow")

    handle = model.register_forward_pre_hook(full, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.parametrize("method", [SnapKV(window=8), AdaKV(window=8)], ids=["snapkv", "adakv"])
@pytest.mark.parametrize("host_bytes", [2**30, 0], ids=["host", "mapped"])
@pytest.mark.parametrize("kind", ["full", "sliding window"])
def test_batches_too_large_for_the_device_are_halved(byte_tokenizer, tmp_path, kind, method, host_bytes):
    gemma = kind != "full"
    model = mixed(Gemma3TextConfig, Gemma3ForCausalLM, tie_word_embeddings=False) if gemma else tiny_llama()
    allocation, said = Allocation([9, 30] if gemma else [9, 30, 12, 50]), []
    common = {"method": method, "host_bytes": host_bytes, "lengths": (5, 40, 40, 40, 71), "new_tokens": 8}
    expected = make(model, byte_tokenizer, store=tmp_path / "a", **common).evaluate(allocation)
    with device_for(model, 2):
        evaluator = make(model, byte_tokenizer, store=tmp_path / "b", say=said.append, batch_size=8, **common)
        found = evaluator.evaluate(allocation)
        assert [len(batch.indices) for batch in evaluator.batches] == [2, 2, 2, 2, 1, 2]
        assert len(said) == 4  # 8, 4, 4 and 3 examples
        assert "a batch of 8 examples does not fit the device's memory" in said[0]
        assert evaluator.evaluate(allocation).outputs == found.outputs
        assert len(said) == 4  # the next allocation begins with what fits
    assert found.outputs == expected.outputs
    assert found.scores == expected.scores
    assert found.log_likelihoods == pytest.approx(expected.log_likelihoods, abs=1e-4)


def test_one_example_too_large_for_the_device(byte_tokenizer):
    model = tiny_llama()
    evaluator = make(model, byte_tokenizer)
    with device_for(model, 0):
        with pytest.raises(
            MemoryError, match=r"one prompt alone does not fit the device's memory: CUDA out of memory"
        ):
            evaluator.evaluate(Allocation([9, 30, 12, 50]))
        with pytest.raises(MemoryError, match="Tried to allocate 2 GiB") as caught:
            make(model, byte_tokenizer)
    assert "\n" not in str(caught.value)


def fill_store(store, ready, made):
    """Another process that needs the same prompts."""
    prefilled, original = [], Prefiller.prefill
    Prefiller.prefill = lambda self, examples: prefilled.extend(e.id for e in examples) or original(self, examples)
    model = tiny_llama()
    ready.wait()
    evaluator = make(model, ModelSource(name="random").tokenizer, count=40, store=store)
    made.put((prefilled, evaluator.evaluate(Allocation([9, 30, 12, 50])).outputs))


def test_processes_share_the_prefill(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, made = context.Barrier(2), context.Queue()
    processes = [context.Process(target=fill_store, args=(tmp_path / "s", ready, made)) for _ in range(2)]
    for process in processes:
        process.start()
    (first, outputs), (second, same) = (made.get(timeout=200) for _ in processes)
    for process in processes:
        process.join()
    assert sorted(first + second) == sorted(f"test-{index}" for index in range(40))  # each by one of them
    assert outputs == same


def test_stored_ranked_caches_are_read_and_damaged_ones_made_again(byte_tokenizer, model, tmp_path, monkeypatch):
    allocation = Allocation([9, 30, 12, 50])
    fresh = make(model, byte_tokenizer, store=tmp_path).evaluate(allocation)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2 * 11  # pairs and order of each example
    order = max(tmp_path.glob("test-0.*"), key=lambda file: len(file.name))
    order.write_bytes(order.read_bytes()[:100])
    (tmp_path / "test-1.safetensors").write_bytes(b"")
    prefilled = count_prefills(monkeypatch)
    again = make(model, byte_tokenizer, store=tmp_path).evaluate(allocation)
    assert set(prefilled) == {"test-0", "test-1"}
    assert again.outputs == fresh.outputs
    assert again.log_likelihoods == fresh.log_likelihoods
    assert sorted(tmp_path.iterdir()) == files  # no temporary files left


DAMAGE = {
    "payload": lambda file: file.write_bytes(file.read_bytes()[:-300] + bytes(300)),
    "another's": lambda file: shutil.copy(file.with_name(file.name.replace("test-0", "test-5")), file),
    "one head": lambda file: rewrite(file, lambda name, tensor: tensor[:, :1] if name != "draft" else tensor),
    "shorter": lambda file: rewrite(file, lambda name, tensor: tensor[:, :, :-3] if tensor.dim() > 2 else tensor),
    "half": lambda file: rewrite(file, lambda name, tensor: tensor.half()),
}


def rewrite(file, change):
    content = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(content, file, metadata=metadata)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("which", ["pairs", "order"])
def test_stored_files_that_hold_something_else_are_made_again(byte_tokenizer, model, tmp_path, damage, which):
    allocation = Allocation([9, 30, 12, 50])
    arguments = {"store": tmp_path, "method": H2O(window=4)}
    fresh = make(model, byte_tokenizer, **arguments).evaluate(allocation)
    files = sorted(tmp_path.glob("test-0.*"), key=lambda file: len(file.name))
    damage(files[which == "order"])
    again = make(model, byte_tokenizer, **arguments).evaluate(allocation)
    assert again.log_likelihoods == fresh.log_likelihoods


def count_prefills(monkeypatch):
    """Ids of the examples that are prefilled from now on."""
    prefilled = []
    original = Prefiller.prefill
    monkeypatch.setattr(
        Prefiller,
        "prefill",
        lambda self, examples: prefilled.extend(example.id for example in examples) or original(self, examples),
    )
    return prefilled


def test_one_prefill_serves_all_methods(byte_tokenizer, tmp_path, monkeypatch):
    model = tiny_llama(dtype=torch.float64)
    several, allocation = list(METHODS.values()), Allocation([9, 30, 12, 50])
    alone = [make(model, byte_tokenizer, method=method).evaluate(allocation) for method in several]
    prefilled = count_prefills(monkeypatch)
    for method, expected in zip(several, alone, strict=True):
        evaluator = make(model, byte_tokenizer, method=method, prefill_for=several, store=tmp_path)
        assert evaluator.evaluate(allocation).outputs == expected.outputs
    assert len(prefilled) == 11
    assert len(list(tmp_path.iterdir())) == 11 * (1 + len(several))  # the pairs are stored once


@EVERY_METHOD
def test_where_the_pairs_lie_changes_nothing(byte_tokenizer, tmp_path, method):
    model = tiny_llama(dtype=torch.float64)
    held, mapped = (
        make(model, byte_tokenizer, method=method, store=tmp_path, host_bytes=limit) for limit in (2**30, 0)
    )
    assert (held.place, mapped.place) == ("host", "mapped")
    for allocation in allocations(4, 3):
        assert decoded(mapped, allocation) == decoded(held, allocation)


def test_place_is_chosen_by_bytes():
    limits = {"device_bytes": 10, "host_bytes": 20}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [place(total, cuda, **limits) for total in (10, 11, 21)] == ["device", "host", "mapped"]
    assert [place(total, cpu, **limits) for total in (10, 11, 21)] == ["host", "host", "mapped"]


def test_layers_that_a_method_never_evicts_count_in_the_mean(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    measured = make(model, byte_tokenizer, method=L2Norm(skip=[1]), lengths=(60,)).evaluate(uniform(4, 20))
    assert measured.mean_budget == measured.realised_mean == (3 * 20 + 60) / 4


SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def mixed(config_class, model_class, **arguments):
    """A tiny model two of whose four layers have a window of 16 tokens."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=260, hidden_size=48, intermediate_size=32, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, sliding_window=16, layer_types=SLIDING, initializer_range=0.3,
        max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=258, **arguments,
    )  # fmt: skip
    return model_class(config).double().eval()


@pytest.mark.parametrize("method", [SnapKV(window=8), AdaKV(window=8), H2O(window=4)], ids=["snapkv", "adakv", "h2o"])
@pytest.mark.parametrize(
    "made",
    [
        lambda: mixed(Gemma3TextConfig, Gemma3ForCausalLM, tie_word_embeddings=False),
        lambda: mixed(GptOssConfig, GptOssForCausalLM, num_local_experts=4, experts_implementation="eager"),
        lambda: mixed(Qwen2Config, Qwen2ForCausalLM, use_sliding_window=True),
    ],
    ids=["gemma3", "gpt_oss", "qwen2"],
)
def test_models_with_sliding_window_layers(byte_tokenizer, tmp_path, made, method):
    model = made()
    of_task = {"questions": (0, 5, 1)}
    evaluator = make(model, byte_tokenizer, method=method, count=5, new_tokens=24, store=tmp_path, of_task=of_task)
    assert evaluator.layers == (1, 3)
    different = 0
    for allocation in allocations(2, 3):
        outputs = decoded(evaluator, allocation)
        for example, output in zip(evaluator.examples, outputs, strict=True):
            expected, logits = live(model, example, allocation, 24, method)
            assert_alike(output, expected, logits)
        different += sum(output != draft for output, draft in zip(outputs, evaluator.drafts, strict=True))
    assert different > 3
    for example, draft in zip(evaluator.examples, evaluator.drafts, strict=True):
        assert_alike(draft, *live(model, example, uniform(2, 71), 24, method))


def test_models_with_recurrent_layers_are_refused(byte_tokenizer):
    config = Qwen3NextConfig(
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] have neither"):
        make(Qwen3NextForCausalLM(config).eval(), byte_tokenizer)


def test_bad_input(byte_tokenizer, model):
    with pytest.raises(ValueError, match="at least one example"):
        make(model, byte_tokenizer, count=0)
    with pytest.raises(ValueError, match="context of 512"):
        make(model, byte_tokenizer, lengths=(600,))
    evaluator = make(model, byte_tokenizer, cap=30)
    with pytest.raises(ValueError, match="4 budgets"):
        evaluator.evaluate(uniform(3, 10))
    with pytest.raises(ValueError, match="at most 30"):
        evaluator.evaluate(uniform(4, 31))


def test_a_cap_changes_nothing_below_it(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    allocation = Allocation([9, 30, 12, 25])
    assert make(model, byte_tokenizer, cap=30).evaluate(allocation).outputs == (
        make(model, byte_tokenizer).evaluate(allocation).outputs
    )


def test_token_tree_shares_prefixes():
    tree = TokenTree([[[5, 6, 7], [5, 6, 8], [9]], [[1]], [[]]])
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert tree.depths.tolist()[0] == [0, 1, 2, 2, 0]
    assert tree.path(0, [5, 6, 8, 1]) == [0, 1, 3]
    assert tree.visible[0].nonzero().tolist() == [
        [0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 3], [4, 4],
    ]  # fmt: skip
