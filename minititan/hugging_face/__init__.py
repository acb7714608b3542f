"""Weights in and out of Hugging Face's form: `config.json`, safetensors in shards, the tokenizer's files.

Everything streams: at no time is more than one tensor of the files in memory. `docs/checkpoints.md` tells how
it is used; what a family looks like in this form is data on its `ModelSpec` (`models/hugging_face.py`).
"""
