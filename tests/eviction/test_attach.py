"""The context of `attach`: what it reports, what it restores, and what it refuses."""

import copy

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, T5Config, T5ForConditionalGeneration

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import AdaKV, L2Norm, SnapKV, attach
from tests.conftest import tiny_llama

METHOD = SnapKV(window=8)
PROMPT = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(1))
NEXT = PROMPT[:, :1]
MIXED = Allocation([10, 50, 20, 8])


def generate(model, prompt=PROMPT, **arguments):
    defaults = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 258}
    return model.generate(prompt, **{**defaults, **arguments})[:, prompt.shape[1] :]


def state_of(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    implementations = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return sum(hooks), attributes, implementations, model.config.to_dict()


def test_the_report(model):
    with attach(model, METHOD, MIXED) as eviction:
        empty = eviction.report()
        assert (empty.layers, empty.lengths, empty.kv_bytes, empty.prompt_tokens) == ((0, 1, 2, 3), [], 0, None)
        model(PROMPT, use_cache=True)
        report = eviction.report()
        assert report.lengths == [[[budget] * 2] * 2 for budget in MIXED.budgets]
        assert report.kv_bytes == 2 * MIXED.kv_bytes(kv_heads=2, head_dim=8, element_bytes=4)
        assert (report.other_bytes, report.prompt_tokens) == (0, 50)
        whole = uniform(4, 50).kv_bytes(kv_heads=2, head_dim=8, element_bytes=4)
        assert report.kv_bytes < report.peak_bytes <= 2 * whole + report.kv_bytes
        assert report.scoring_seconds > 0
        generate(model)
        assert eviction.report().lengths == [[[budget + 11] * 2] * 2 for budget in MIXED.budgets]
        assert eviction.report().scoring_seconds > report.scoring_seconds
    assert eviction.report().lengths == [[[budget + 11] * 2] * 2 for budget in MIXED.budgets]


def test_the_report_of_a_prompt_that_goes_on(model):
    with attach(model, METHOD, MIXED, prompt_ends_at=50) as eviction:
        cache = model(PROMPT[:, :30], use_cache=True).cache
        assert eviction.report().prompt_tokens is None
        assert eviction.report().lengths == [[[30, 30]] * 2] * 4
        model(PROMPT[:, 30:], cache=cache)
        assert eviction.report().prompt_tokens == 50
        assert eviction.report().lengths == [[[budget] * 2] * 2 for budget in MIXED.budgets]


def test_every_prompt_of_a_run_is_evicted_and_a_b_a_gives_a_twice(model):
    with attach(model, METHOD, MIXED):
        first = generate(model)
    with attach(model, METHOD, uniform(4, 9)):
        other = generate(model)
        assert not torch.equal(first, other)
    with attach(model, METHOD, MIXED):
        assert torch.equal(generate(model), first)
        assert torch.equal(generate(model), first)


def test_a_b_a_of_methods(model):
    found = []
    for method in (METHOD, AdaKV(window=8), METHOD):
        with attach(model, method, MIXED):
            found.append(generate(model))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    model = tiny_llama(dtype=dtype)
    with attach(model, METHOD, MIXED) as eviction:
        assert generate(model).shape == (2, 12)
        assert eviction.report().kv_bytes == 2 * (88 + 44) * 2 * 2 * 8 * dtype.itemsize
    with attach(model, METHOD, uniform(4, 50)):
        whole = generate(model)
    assert torch.equal(whole, generate(model))


def test_positions_go_on_from_the_true_length():
    model = tiny_llama(dtype=torch.float64)
    seen = []
    with torch.no_grad(), attach(model, METHOD, MIXED):
        handle = model.model.rotary_emb.register_forward_hook(
            lambda module, args, kwargs, output: seen.append(kwargs["position_ids"].tolist()),
            with_kwargs=True,
        )
        cache = model(PROMPT[:1]).cache
        model(NEXT[:1], cache=cache)
        assert cache.get_seq_length() == 51
        handle.remove()
    assert seen[-1] == [[50]]


def test_embeddings_and_the_bare_decoder_can_be_fed(model):
    with torch.no_grad(), attach(model, METHOD, MIXED) as eviction:
        wanted = model(NEXT, cache=model(PROMPT).cache, output_hidden_states=True).hidden_states[-1]
        embedded = model.get_input_embeddings()(PROMPT)
        got = model(NEXT, cache=model(inputs_embeds=embedded).cache, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(got, wanted)
    with torch.no_grad(), attach(model.model, METHOD, MIXED) as eviction:
        got = model.model(NEXT, cache=model.model(PROMPT).cache).last_hidden_state
        assert torch.equal(got, wanted)
        assert eviction.report().lengths[3] == [[9, 9]] * 2


def test_rows_of_a_cache_can_be_chosen_and_repeated(model):
    for method in (METHOD, AdaKV(window=8)):
        with torch.no_grad(), attach(model, method, MIXED) as eviction:
            wanted = model(NEXT, cache=model(PROMPT).cache).logits
            cache = model(PROMPT).cache
            cache.batch_repeat_interleave(2)
            torch.testing.assert_close(model(NEXT.repeat_interleave(2, 0), cache=cache).logits[::2], wanted)
            cache = model(PROMPT).cache
            cache.batch_select_indices(torch.tensor([1]))
            torch.testing.assert_close(model(NEXT[1:], cache=cache).logits, wanted[1:])
            assert len(eviction.report().lengths[0]) == 1


def test_a_copy_of_a_cache_takes_its_place(model):
    """One context, several questions: the usual way is a deep copy of the filled cache for each."""
    with torch.no_grad(), attach(model, METHOD, MIXED, prompt_ends_at=50):
        cache = model(PROMPT).cache
        copied = copy.deepcopy(cache)
        assert torch.equal(model(NEXT, cache=copied).logits, model(NEXT, cache=cache).logits)
        assert copied.get_seq_length() == 51


def test_a_cache_can_be_emptied_and_used_again(model):
    with attach(model, METHOD, MIXED) as eviction:
        cache = DynamicCache(config=model.config)
        first = generate(model, cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(model, cache=cache), first)
        assert eviction.report().lengths[0] == [[21, 21]] * 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_everything_is_restored_after_an_exception(model, error):
    before, plain = state_of(model), generate(model)

    def fail_inside():
        with attach(model, METHOD, MIXED):
            generate(model)
            raise error

    with pytest.raises(error):
        fail_inside()
    assert state_of(model) == before
    assert torch.equal(generate(model), plain)


def test_everything_is_restored_after_an_exception_in_a_layer(model):
    before, plain = state_of(model), generate(model)
    broken = SnapKV(window=8)
    broken.scores = lambda states, observed: 1 / 0
    with pytest.raises(ZeroDivisionError), attach(model, broken, MIXED):
        generate(model)
    assert state_of(model) == before
    assert torch.equal(generate(model), plain)


BAD_ARGUMENTS = {
    "length": ((METHOD, Allocation([10, 10])), {}, r"4 budgets.*got 2"),
    "list": ((METHOD, [10, 50, 20, 8]), {}, "Allocation"),
    "class": ((SnapKV, MIXED), {}, "EvictionMethod"),
    "string": (("SnapKV", MIXED), {}, "EvictionMethod"),
    "skip": ((L2Norm(skip=[4]), MIXED), {}, r"skip.*\[4\]"),
    "end 0": ((METHOD, MIXED), {"prompt_ends_at": 0}, "prompt_ends_at.*got 0"),
    "end -1": ((METHOD, MIXED), {"prompt_ends_at": -1}, "prompt_ends_at.*got -1"),
    "end 1.5": ((METHOD, MIXED), {"prompt_ends_at": 1.5}, "prompt_ends_at.*got 1.5"),
    "end True": ((METHOD, MIXED), {"prompt_ends_at": True}, "prompt_ends_at.*got True"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_leave_the_model_untouched(model, case):
    arguments, options, message = BAD_ARGUMENTS[case]
    before = state_of(model)
    with pytest.raises(ValueError, match=message), attach(model, *arguments, **options):
        pass
    assert state_of(model) == before


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="layer 0 has 0"):
        Allocation([0, 10, 10, 10])


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_other_attention_implementations_are_refused(model, implementation):
    model.config._attn_implementation_internal = implementation
    before = state_of(model)
    with pytest.raises(ValueError, match=f"sdpa, eager.*{implementation}"), attach(model, METHOD, MIXED):
        pass
    assert state_of(model) == before


def test_attached_twice(model):
    before = state_of(model)
    with attach(model, METHOD, MIXED):
        first = generate(model)
        with pytest.raises(ValueError, match="attached already"), attach(model, METHOD, uniform(4, 9)):
            pass
        assert torch.equal(generate(model), first)
    assert state_of(model) == before


def test_training_mode(model):
    model.train()
    before = state_of(model)
    with pytest.raises(ValueError, match="training mode"), attach(model, METHOD, MIXED):
        pass
    assert state_of(model) == before
    model.eval()
    with attach(model, METHOD, MIXED):
        model.train()
        with pytest.raises(ValueError, match="training mode"):
            model(PROMPT)
        model.eval()
        generate(model)


def test_other_models_are_refused():
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"t5.*decoder-only"), attach(model, METHOD, Allocation([4, 4])):
        pass
    assert state_of(model) == before
    with (
        pytest.raises(ValueError, match="transformers model; got Linear"),
        attach(torch.nn.Linear(2, 2), METHOD, MIXED),
    ):
        pass


def test_caches_of_other_runs_are_refused(model):
    filled = model(PROMPT, use_cache=True).cache
    with attach(model, METHOD, MIXED):
        with pytest.raises(ValueError, match="another run"):
            model(NEXT, cache=filled)
        evicted = model(PROMPT).cache
    with attach(model, METHOD, uniform(4, 9)), pytest.raises(ValueError, match="another run"):
        model(NEXT, cache=evicted)
    with pytest.raises(RuntimeError, match="attach"):
        model(NEXT, cache=evicted)
    with pytest.raises(RuntimeError, match="attach"):
        generate(model, torch.cat([PROMPT, NEXT], dim=1), cache=evicted)


def test_a_cache_is_refused_after_leaving_even_if_empty_again(model):
    with attach(model, METHOD, MIXED):
        cache = model(PROMPT).cache
    cache.reset()
    with pytest.raises(RuntimeError, match="attach"):
        model(PROMPT, cache=cache)


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_other_caches_are_refused(model, kind):
    cache = {
        "static": lambda: StaticCache(config=model.config, max_cache_len=100),
        "offloaded": lambda: DynamicCache(config=model.config, offloading=True),
        "quantized": lambda: QuantizedCache("fp8", model.config),
    }[kind]()
    with attach(model, METHOD, MIXED), pytest.raises(ValueError, match="eviction needs a DynamicCache"):
        model(PROMPT, cache=cache)


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_other_caches_of_generate_are_refused(model, kind):
    with attach(model, METHOD, MIXED), pytest.raises(ValueError, match="eviction needs a DynamicCache"):
        generate(model, cache_implementation=kind)


def test_without_a_cache(model):
    with attach(model, METHOD, MIXED):
        with pytest.raises(ValueError, match="use_cache"):
            model(PROMPT, use_cache=False)
        with pytest.raises(ValueError, match="use_cache"):
            generate(model, use_cache=False)


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("at", ["prompt", "next"])
def test_masks_of_four_dimensions_are_refused(model, fill, at):
    with attach(model, METHOD, MIXED):
        cache = None if at == "prompt" else model(PROMPT).cache
        tokens, keys = (PROMPT, 50) if at == "prompt" else (NEXT, 51)
        mask = torch.full((2, 1, tokens.shape[1], keys), fill)
        with pytest.raises(ValueError, match="mask must be 2-D"):
            model(tokens, cache=cache, attention_mask=mask)


@pytest.mark.parametrize("length", [1, 11, 50, 52])
@pytest.mark.parametrize("method", [METHOD, AdaKV(window=8)], ids=["SnapKV", "AdaKV"])
def test_masks_that_do_not_fit_the_tokens_seen_are_refused(model, method, length):
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :20] = 0
    with attach(model, method, MIXED):
        cache = model(PROMPT, attention_mask=mask).cache
        stale = torch.ones(2, length, dtype=torch.long)
        stale[0, 0] = 0
        with pytest.raises(ValueError, match=r"cover the 51 tokens seen.*shape"):
            model(NEXT, attention_mask=stale, cache=cache)


@pytest.mark.parametrize("length", [1, 49, 51])
def test_masks_that_do_not_fit_the_prompt_are_refused(model, length):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, 0] = 0
    with attach(model, METHOD, MIXED), pytest.raises(ValueError, match=r"cover the 50 tokens seen.*shape"):
        model(PROMPT, attention_mask=mask)


@pytest.mark.parametrize("method", [METHOD, AdaKV(window=8), L2Norm()], ids=["SnapKV", "AdaKV", "L2Norm"])
def test_padding_on_the_right_is_refused(model, method):
    mask = torch.ones_like(PROMPT)
    mask[0, 30:] = 0  # else the window of row 0 would be padding
    with attach(model, method, MIXED), pytest.raises(ValueError, match="left"):
        model(PROMPT, attention_mask=mask)


def test_models_attached_side_by_side(model):
    other = tiny_llama(seed=1)
    other.set_attn_implementation("eager")
    with attach(model, METHOD, MIXED):
        wanted = generate(model)
    with attach(other, METHOD, uniform(4, 9)):
        wanted_of_other = generate(other)
        with attach(model, METHOD, MIXED):
            assert torch.equal(generate(model), wanted)
            assert torch.equal(generate(other), wanted_of_other)


@pytest.mark.parametrize("budget", [10, 999])
@pytest.mark.parametrize("hold_budget", [False, True])
@pytest.mark.parametrize("way", ["lookup", "other assistant", "same assistant"])
def test_decoding_that_takes_tokens_back_is_refused(model, way, budget, hold_budget):
    arguments = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "other assistant": {"assistant_model": tiny_llama(layers=1, seed=1)},
        "same assistant": {"assistant_model": tiny_llama()},
    }[way]
    before = state_of(model)
    prompt = PROMPT[:1, :8].repeat(1, 5)  # repeats itself, so that the lookup finds something
    with (
        attach(model, METHOD, uniform(4, budget), hold_budget=hold_budget),
        pytest.raises(ValueError, match="decoding"),
    ):
        generate(model, prompt, **arguments)
    assert state_of(model) == before
