"""Loggers that show up in a vLLM process: vLLM configures handlers below its own name only."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of ours, as a child of vLLM's."""
    return logging.getLogger(f"vllm.{name}")
