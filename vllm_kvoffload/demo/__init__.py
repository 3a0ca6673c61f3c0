"""Demo models and text: everything the demos and the end-to-end tests need, without a download.

Owns `checkpoint` (builds small random GLM-DSA and DeepSeek checkpoints), `weights` (how they are made
random yet meaningful), `text` (the packaged essay and its tokenizer) and `prompts`. It imports torch,
safetensors and tokenizers only when something is built, and never touches an engine.
"""
