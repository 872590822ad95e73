"""mosaic_opt: how many KV pairs each decoder layer of an LLM should keep, found by search."""

__version__ = "0.1.0"
