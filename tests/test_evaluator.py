import numpy as np
import pytest
import torch

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.decoding import TokenTree
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import SnapKV, attach
from mosaic_opt.eviction.attach import attention_switched
from mosaic_opt.ranked import Prefiller
from mosaic_opt.tasks import Needle, ruler
from tests.conftest import RandomTokens, tiny_llama

METHOD = SnapKV(window=8)
LENGTHS = (5, 40, 60, 60, 71)


def make(model, tokenizer, *, lengths=LENGTHS, count=11, new_tokens=16, **arguments):
    task = RandomTokens(lengths, new_tokens=new_tokens)
    examples = task.examples(tokenizer, "test", count)
    return Evaluator(
        model=model, tokenizer=tokenizer, task=task, examples=examples, method=METHOD,
        **{"batch_size": 4, **arguments},
    )  # fmt: skip


@torch.inference_mode()
def decoded(evaluator, allocation):
    """Output tokens of every example, as the evaluator finds them."""
    tokens = {}
    with attention_switched(evaluator.model) as backend:
        for batch in evaluator.batches:
            outputs, _ = evaluator._decoding(backend, batch, allocation, complete=True).run()
            tokens.update(zip(batch.indices, outputs, strict=True))
    return [tokens[index] for index in range(len(tokens))]


def live(model, example, allocation, new_tokens, method=METHOD):
    """Tokens of plain generation with the eviction attached, and the logits of each step."""
    prompt = torch.tensor([example.tokens])
    with attach(model, method, allocation):
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return made.sequences[0, prompt.shape[1] :].tolist(), made.logits


def allocations(layers, count, *, most=75, seed=0):
    rng = np.random.default_rng(seed)
    return [uniform(layers, most), *(Allocation(rng.integers(1, most, size=layers)) for _ in range(count))]


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)])
def test_tokens_are_those_of_the_live_model(byte_tokenizer, heads):
    model = tiny_llama(heads=heads[0], kv_heads=heads[1], dtype=torch.float64)
    evaluator = make(model, byte_tokenizer)
    different = 0
    for allocation in allocations(4, 5):
        outputs = decoded(evaluator, allocation)
        for example, output in zip(evaluator.examples, outputs, strict=True):
            assert output == live(model, example, allocation, 16)[0]
        different += sum(output != draft for output, draft in zip(outputs, evaluator.drafts, strict=True))
    assert different > 20  # eviction changed what is compared


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


def test_log_likelihood_is_that_of_the_best_reference(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer)
    allocation = Allocation([9, 30, 12, 50])
    measured = evaluator.evaluate(allocation)
    for example, found in zip(evaluator.examples, measured.log_likelihoods, strict=True):
        expected = []
        for reference in example.answer_tokens:
            with torch.no_grad(), attach(model, METHOD, allocation):
                cache = model(torch.tensor([example.tokens])).cache
                logits = model(torch.tensor([reference[:-1]]), cache=cache).logits[0]
            steps = torch.log_softmax(logits.float(), dim=-1)
            expected.append(sum(float(steps[i, token]) for i, token in enumerate(reference[1:])))
        assert found == pytest.approx(max(expected), abs=1e-4)


def test_smollm2_tokens_are_those_of_the_live_model(smollm2):
    source, model = smollm2
    task = Needle(name="niah_single_2", haystack="essay", keys=1, tokens=400)
    method = SnapKV()
    examples = task.examples(source.tokenizer, "test", 3)
    evaluator = Evaluator(model=model, tokenizer=source.tokenizer, task=task, examples=examples, method=method)
    rng = np.random.default_rng(0)
    ties = 0
    for allocation in [uniform(30, 96), Allocation(rng.choice([32, 64, 128, 400], size=30))]:
        for example, output in zip(examples, decoded(evaluator, allocation), strict=True):
            expected, logits = live(model, example, allocation, task.new_tokens, method)
            if output != expected:  # allowed only at a tie
                step = next(i for i, pair in enumerate(zip(output, expected, strict=False)) if pair[0] != pair[1])
                gap = logits[step][0, output[step]] - logits[step][0, expected[step]]
                assert abs(float(gap)) <= 1e-4
                ties += 1
    print(f"ties: {ties}")


def test_outputs_cut_where_the_score_is_settled_score_the_same(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    evaluator = make(model, byte_tokenizer)
    for example, draft in zip(evaluator.examples, evaluator.drafts, strict=True):
        text = evaluator.text(draft)  # a reference that some outputs contain, some begin, some miss
        plain = [part for part in (text[i : i + 2] for i in range(len(text))) if part.isascii() and part.isalnum()]
        object.__setattr__(example, "references", (plain[0] if plain else "zz",))
    evaluator.task.score = lambda text, references: ruler.score("niah_single_1", text, references)
    evaluator.task.settled = ruler.settled
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
        for row in range(len(batch.references)):
            batch.references[row] = [(7,)] if row % 2 else []
    assert set(evaluator.evaluate(uniform(4, 9)).log_likelihoods) == {0.0}


def test_batching_changes_nothing(byte_tokenizer):
    model = tiny_llama(dtype=torch.float64)
    allocation = Allocation([9, 30, 12, 50])
    small, large = (make(model, byte_tokenizer, batch_size=size).evaluate(allocation) for size in (1, 64))
    assert small.outputs == large.outputs
    assert small.log_likelihoods == pytest.approx(large.log_likelihoods, abs=1e-6)


def test_stored_ranked_caches_are_read_and_damaged_ones_made_again(byte_tokenizer, model, tmp_path, monkeypatch):
    allocation = Allocation([9, 30, 12, 50])
    fresh = make(model, byte_tokenizer, store=tmp_path).evaluate(allocation)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 11
    files[0].write_bytes(files[0].read_bytes()[:100])
    files[1].write_bytes(b"")
    prefilled = []
    original = Prefiller.prefill
    monkeypatch.setattr(
        Prefiller, "prefill", lambda self, examples: prefilled.extend(examples) or original(self, examples)
    )
    again = make(model, byte_tokenizer, store=tmp_path).evaluate(allocation)
    assert {f"{example.id}.safetensors" for example in prefilled} == {files[0].name, files[1].name}
    assert again.outputs == fresh.outputs
    assert again.log_likelihoods == fresh.log_likelihoods
    assert sorted(tmp_path.iterdir()) == files  # no temporary files left


def test_bad_input(byte_tokenizer, model):
    with pytest.raises(ValueError, match="at least one example"):
        make(model, byte_tokenizer, count=0)
    with pytest.raises(ValueError, match="context 512"):
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
