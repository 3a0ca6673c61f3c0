"""Environment of every test process; it must stand before vLLM's first import."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines run in the test's own process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM warns of a dozen harmless things at every start
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default leaves one of two cores idle
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the side streams
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
