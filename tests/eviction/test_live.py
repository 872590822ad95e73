"""Every method on a live model: ways of generating, of feeding the prompt, and what stays in memory."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, L2Norm, SnapKV, StreamingLLM, attach
from tests.conftest import tiny_llama
from tests.memory import PeakMemory

METHODS = [
    SnapKV(window=4, kernel=3),
    AdaKV(window=4, kernel=3),
    H2O(window=4),
    H2O(window=2, recent_fraction=0.5),
    L2Norm(),
    L2Norm(skip=[1]),
    KeyDiff(),
    TOVA(),
    StreamingLLM(sinks=2),
    ExpectedAttention(queries=8, sinks=2),
]
NAMES = [
    "SnapKV",
    "AdaKV",
    "H2O",
    "H2O-recent",
    "L2Norm",
    "L2Norm-skip",
    "KeyDiff",
    "TOVA",
    "StreamingLLM",
    "Expected",
]
every_method = pytest.mark.parametrize("method", METHODS, ids=NAMES)
padded_or_not = pytest.mark.parametrize("padding", [0, 17], ids=["", "padded"])

PROMPT = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
QUESTION = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(2))
BUDGETS = Allocation([9, 40, 14])  # the second layer is not cut


@pytest.fixture(scope="module")
def model():
    """In float64, so that another order of sums changes no token; tests leave it as it is."""
    return tiny_llama(layers=3, heads=4, dtype=torch.float64)


def mask_of(padding, prompt=PROMPT):
    """Row 0 begins with `padding` padding tokens."""
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    return mask


def generate(model, prompt=PROMPT, **arguments):
    defaults = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 258}
    return model.generate(prompt, **{**defaults, **arguments})[:, prompt.shape[1] :]


def forward(model, tokens, cache=None, padding=0):
    """Feed tokens behind those of the cache, with the mask and positions that generate would give."""
    seen = (0 if cache is None else cache.get_seq_length()) + tokens.shape[1]
    mask = mask_of(padding, torch.empty(tokens.shape[0], seen, dtype=torch.long))
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    with torch.no_grad():
        return model(tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)


def wanted_lengths(method, tokens, after=0):
    """Pairs per layer and example, mean over heads."""
    budgets = [max(tokens) if layer in method.skip else budget for layer, budget in enumerate(BUDGETS.budgets)]
    return [[min(budget, seen) + after for seen in tokens] for budget in budgets]


def mean_lengths(eviction):
    return [[sum(row) / len(row) for row in layer] for layer in eviction.report().lengths]


@every_method
@padded_or_not
@pytest.mark.parametrize(
    "arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"]
)
def test_a_budget_of_the_whole_prompt_is_the_plain_model(model, method, padding, arguments):
    mask = mask_of(padding)
    torch.manual_seed(3)
    plain = generate(model, attention_mask=mask, **arguments)
    torch.manual_seed(3)
    with attach(model, method, uniform(3, 40)):
        assert torch.equal(generate(model, attention_mask=mask, **arguments), plain)


@every_method
@padded_or_not
@pytest.mark.parametrize(
    "arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"]
)
def test_lengths_and_a_rerun(model, method, padding, arguments):
    found = []
    with attach(model, method, BUDGETS) as eviction:
        for _ in range(2):
            torch.manual_seed(3)
            found.append(generate(model, attention_mask=mask_of(padding), **arguments))
            beams = arguments.get("num_beams", 1)
            tokens = [40 - padding] * beams + [40] * beams
            assert mean_lengths(eviction) == wanted_lengths(method, tokens, after=5)
    assert torch.equal(*found)


@every_method
@pytest.mark.parametrize("padding", [17, 37, 39])
@pytest.mark.parametrize("beams", [1, 2])
def test_left_padding_gives_each_row_what_it_gets_alone(model, method, padding, beams):
    with attach(model, method, BUDGETS):
        together = generate(model, attention_mask=mask_of(padding), num_beams=beams)
        alone = generate(model, PROMPT[:1, padding:], num_beams=beams), generate(model, PROMPT[1:], num_beams=beams)
    assert torch.equal(together, torch.cat(alone))


@every_method
@padded_or_not
@pytest.mark.parametrize("hold_budget", [False, True])
def test_a_held_or_free_row_has_the_logits_it_has_alone(model, method, padding, hold_budget):
    def fed(prompt, question, padding):
        with attach(model, method, BUDGETS, hold_budget=hold_budget):
            output = forward(model, prompt, padding=padding)
            logits = [output.logits[:, -1:]]
            logits += [forward(model, token, output.cache, padding).logits for token in question.split(1, dim=1)]
        return torch.cat(logits, dim=1)

    together = fed(PROMPT, QUESTION, padding)
    alone = fed(PROMPT[:1, padding:], QUESTION[:1], 0), fed(PROMPT[1:], QUESTION[1:], 0)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-9)


@every_method
@padded_or_not
@pytest.mark.parametrize("size", [7, 20])
def test_a_prompt_in_chunks_gives_the_same(model, method, padding, size):
    mask = mask_of(padding)
    with attach(model, method, BUDGETS) as eviction:
        whole = generate(model, attention_mask=mask)
        lengths = eviction.report().lengths
    with attach(model, method, BUDGETS, prompt_ends_at=40) as eviction:
        assert torch.equal(generate(model, attention_mask=mask, prefill_chunk_size=size), whole)
        assert eviction.report().lengths == lengths
        assert eviction.report().prompt_tokens == 40


def test_a_chunk_that_crosses_the_end_is_refused(model):
    with attach(model, METHODS[0], BUDGETS, prompt_ends_at=30) as eviction:
        with pytest.raises(ValueError, match="crosses prompt_ends_at=30"):
            generate(model)
        with pytest.raises(ValueError, match="crosses prompt_ends_at=30"):
            generate(model, prefill_chunk_size=7)
        eviction.prompt_ends_at = 40
        generate(model)
        assert eviction.report().lengths[0] == [[14, 14], [14, 14]]


@every_method
@padded_or_not
def test_a_question_attends_to_the_evicted_context(model, method, padding):
    with attach(model, method, BUDGETS, prompt_ends_at=40) as eviction:
        output = forward(model, PROMPT, padding=padding)
        kept = mean_lengths(eviction)
        assert kept == wanted_lengths(method, [40 - padding, 40])
        together = forward(model, QUESTION, output.cache, padding).logits
        assert mean_lengths(eviction) == [[length + 8 for length in layer] for layer in kept]
        cache = forward(model, PROMPT, padding=padding).cache
        single = [forward(model, token, cache, padding).logits for token in QUESTION.split(1, dim=1)]
        torch.testing.assert_close(together, torch.cat(single, dim=1), rtol=0, atol=1e-9)
        both, mask = torch.cat([PROMPT, QUESTION], dim=1), mask_of(padding, torch.empty(2, 48))
        answer = generate(model, both, attention_mask=mask.long(), prefill_chunk_size=8)
        assert torch.equal(answer[:, 0], together[:, -1].argmax(dim=-1))
    assert not torch.allclose(together, forward(model, QUESTION, forward(model, PROMPT).cache).logits)


@every_method
@padded_or_not
def test_one_cache_for_several_turns(model, method, padding):
    with attach(model, method, BUDGETS) as eviction:
        cache, seen = DynamicCache(config=model.config), PROMPT
        for turn in range(3):
            mask = mask_of(padding, seen)
            answer = generate(model, seen, attention_mask=mask, cache=cache)
            assert cache.get_seq_length() == seen.shape[1] + 5
            assert mean_lengths(eviction) == wanted_lengths(method, [40 - padding, 40], after=seen.shape[1] - 35)
            seen = torch.cat([seen, answer, QUESTION + turn], dim=1)
        replayed = forward(model, PROMPT, padding=padding).cache
        logits = forward(model, seen[:, 40:-8], replayed, padding).logits
    assert torch.equal(answer, logits[:, -7:-1].argmax(dim=-1))


@every_method
@pytest.mark.parametrize("length", [1, 3, 5, 9])
@pytest.mark.parametrize("ends", [None, "at the end"])
def test_short_prompts_are_not_cut(model, method, length, ends):
    prompt = PROMPT[:, :length]
    plain = generate(model, prompt)
    with attach(model, method, BUDGETS, prompt_ends_at=length if ends else None) as eviction:
        assert torch.equal(generate(model, prompt), plain)
        assert eviction.report().lengths == [[[length + 5] * 2] * 2] * 3


@every_method
@pytest.mark.parametrize("budget", [1, 3, 4, 5])
def test_budgets_around_the_window(model, method, budget):
    with attach(model, method, uniform(3, budget)) as eviction:
        generate(model, attention_mask=mask_of(38))
        held = [layer for index, layer in enumerate(mean_lengths(eviction)) if index not in method.skip]
        assert held == [[min(budget, 2) + 5, budget + 5]] * len(held)


@every_method
@padded_or_not
def test_held_budgets_after_every_step(model, method, padding):
    with attach(model, method, BUDGETS, hold_budget=True) as eviction:
        cache = forward(model, PROMPT, padding=padding).cache
        for step in range(10):
            forward(model, QUESTION[:, [step % 8]], cache, padding)
            tokens = [40 - padding + step + 1, 40 + step + 1]
            assert mean_lengths(eviction) == wanted_lengths(method, tokens)
            if not isinstance(method, AdaKV):
                assert all(len(set(row)) == 1 for layer in eviction.report().lengths for row in layer)
        assert cache.get_seq_length() == 50
        forward(model, QUESTION, cache, padding)  # several tokens at once
        assert mean_lengths(eviction) == wanted_lengths(method, [58 - padding, 58])


@every_method
def test_held_budgets_with_beams_chunks_and_prompts_that_grow(model, method):
    with attach(model, method, BUDGETS, hold_budget=True) as eviction:
        generate(model, num_beams=3, max_new_tokens=20)
        assert mean_lengths(eviction) == wanted_lengths(method, [40 + 19] * 6)
        generate(model, PROMPT[:, :1], max_new_tokens=20)
        assert mean_lengths(eviction) == wanted_lengths(method, [20] * 2)
        whole = generate(model)
        eviction.prompt_ends_at = 40
        assert torch.equal(generate(model, prefill_chunk_size=7), whole)


def states_of(model, tokens):
    """Queries, keys and scaling of a model of one layer, as its attention sees them."""
    seen = {}

    def recording(module, query, key, value, attention_mask, scaling, **kwargs):
        seen.update(query=query, key=key, scaling=scaling)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register("recording", recording)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(tokens)
    model.set_attn_implementation("sdpa")
    return seen["query"][0], seen["key"][0], seen["scaling"]


def simulated(model, method, tokens, prompt, budget):
    """Positions that one layer holds after each token behind the prompt, [step][head]; literal and slow."""
    queries, keys, scaling = states_of(model, tokens)
    H, G = queries.shape[0], keys.shape[0]

    def attention(query, position, kept):  # of one query head over the pairs kept
        return torch.softmax(keys[query // (H // G), kept] @ queries[query, position] * scaling, dim=0)

    kept = [list(range(prompt)) for _ in range(G)]
    received = torch.zeros(G, tokens.shape[1], dtype=torch.float64)
    history = []
    for position in range(tokens.shape[1]):
        current = torch.zeros(G, tokens.shape[1], dtype=torch.float64)
        for head in range(G):
            if position >= prompt:
                kept[head].append(position)
            seen = [other for other in kept[head] if other <= position]
            for query in range(head * (H // G), (head + 1) * (H // G)):
                current[head, seen] += attention(query, position, seen) / (H // G)
        received += current
        if position < prompt - 1:
            continue
        scores = received if isinstance(method, H2O) else current.mean(dim=0).expand(G, -1)
        for head in range(G):
            while len(kept[head]) > budget:
                old = [other for other in kept[head] if other <= position - method.window]
                kept[head].remove(min(old, key=lambda other: float(scores[head, other])))
        history.append([list(head) for head in kept])
    return keys, history


@pytest.mark.parametrize("method", [H2O(window=3), H2O(window=0), TOVA()], ids=["H2O", "H2O-no-window", "TOVA"])
@pytest.mark.parametrize("budget", [5, 12])
def test_held_budgets_drop_the_pairs_that_the_papers_drop(method, budget):
    model = tiny_llama(layers=1, heads=4, dtype=torch.float64)
    tokens = torch.cat([PROMPT, QUESTION, QUESTION.flip(0), QUESTION + 1], dim=1)[:1]
    keys, wanted = simulated(model, method, tokens, 40, budget)
    with attach(model, method, uniform(1, budget), hold_budget=True):
        cache = forward(model, tokens[:, :40]).cache
        for step, positions in enumerate(wanted):
            if step:
                forward(model, tokens[:, [39 + step]], cache)
            held = cache.layers[0].prefix.keys[0]
            for head, own in enumerate(positions):
                torch.testing.assert_close(held[head], keys[head, own], rtol=0, atol=1e-9)


LONGER = torch.randint(0, 256, (2, 800), generator=torch.Generator().manual_seed(4))
LONG = LONGER[:, :512]


@pytest.fixture(scope="module")
def long_model():
    """Shaped like large ones: four query heads a KV head, an MLP 3.5 times as wide as the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=896, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=800, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def reachable_bytes(cache):
    """Bytes of all storages that the evictable layers hold, in whatever attribute."""
    found, todo, known = {}, list(cache.layers), set()
    while todo:
        thing = todo.pop()
        if id(thing) in known:
            continue
        known.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict | list | tuple):
            todo += thing.values() if isinstance(thing, dict) else thing
        elif type(thing).__module__ == "mosaic_opt.eviction.cache":
            todo.append(vars(thing))
    return sum(found.values())


@every_method
@pytest.mark.parametrize("padding", [0, 200], ids=["", "padded"])
@pytest.mark.parametrize("hold_budget", [False, True])
@pytest.mark.parametrize("budget", [24, 508])
def test_resident_bytes_are_those_of_the_pairs_kept(long_model, method, padding, hold_budget, budget):
    with attach(long_model, method, uniform(2, budget), hold_budget=hold_budget) as eviction:
        cache = forward(long_model, LONG, padding=padding).cache
        for step in range(2):
            report = eviction.report()
            pairs = torch.tensor(report.lengths).sum().item()
            size = pairs * 2 * 32 * 4
            assert abs(report.kv_bytes - size) <= 0.02 * size
            observed = [layer.observed for layer in cache.layers if layer.observed is not None]
            assert not observed or hold_budget
            small = sum(tensor.nbytes for tensor in observed)
            assert abs(reachable_bytes(cache) - small - size) <= 0.02 * size
            assert report.peak_bytes >= report.kv_bytes
            forward(long_model, QUESTION[:, [step]], cache, padding)


def peak_of(model, prompt, mask):
    gc.collect()
    with torch.no_grad(), PeakMemory() as peak:
        model(prompt, attention_mask=mask, use_cache=True, logits_to_keep=1)  # so that logits are not the peak
    return peak.bytes


@pytest.fixture(scope="module")
def plain_peaks(long_model):
    return {padding: peak_of(long_model, LONGER, mask_of(padding, LONGER)) for padding in (0, 200)}


@every_method
@pytest.mark.parametrize("padding", [0, 200], ids=["", "padded"])
@pytest.mark.parametrize("budget", [24, 796])
def test_a_prefill_needs_at_most_one_layer_more(long_model, plain_peaks, method, padding, budget):
    with attach(long_model, method, uniform(2, budget)):
        evicting = peak_of(long_model, LONGER, mask_of(padding, LONGER))
    assert evicting - plain_peaks[padding] <= LONGER.numel() * 2 * 2 * 32 * 4


def test_a_cache_left_half_filled_by_an_interrupted_forward_is_refused(model):
    cache = DynamicCache(config=model.config)
    with attach(model, SnapKV(window=4), uniform(3, 9)):
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(PROMPT, cache=cache)
        handle.remove()
        with pytest.raises(ValueError, match="half filled"):
            model(PROMPT, cache=cache)


def test_a_mask_that_hides_other_tokens_than_the_prompt_was_cut_with_is_refused(model):
    for padding in (0, 5):
        mask = torch.ones_like(PROMPT)
        mask[0, :padding] = 0
        with torch.no_grad(), attach(model, SnapKV(window=4), uniform(3, 20)):
            cache = model(PROMPT, attention_mask=mask).cache
            longer = torch.nn.functional.pad(mask, (0, 3), value=1)
            model(PROMPT[:, :3], attention_mask=longer, cache=cache)
            changed = torch.nn.functional.pad(longer, (0, 1), value=1)
            changed[1, :2] = 0
            with pytest.raises(ValueError, match="when the prompt was cut"):
                model(PROMPT[:, :1], attention_mask=changed, cache=cache)


def test_threads_share_a_context(model):
    prompts = [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in (20, 31, 45, 60)]

    def tokens(prompt):
        return model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=258)

    with attach(model, H2O(window=4), uniform(3, 12)):
        alone = [tokens(prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                assert all(map(torch.equal, pool.map(tokens, prompts), alone))
