"""Demo models and text: everything the demos and the end-to-end tests need, without a download.

Owns `checkpoint` (builds small random GLM-DSA and DeepSeek checkpoints), `weights` (how they are made
random yet meaningful), `text` (the packaged essay and its tokenizer), `prompts`, and the demonstration
itself: `run` starts two servers one after the other (`server`, `launch`, `processes`), sends them the same
`workload` through `client` and compares in `report`. Engines are other processes; torch, safetensors and
tokenizers are imported only when something is built.
"""
