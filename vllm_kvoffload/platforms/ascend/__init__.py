"""Worker, runner and attention subclasses over vLLM-Ascend. Nothing is here yet: there is no Ascend support so far."""
