"""Worker, runner and attention subclasses over vLLM-Ascend. Nothing is here yet: no Ascend support so far."""
