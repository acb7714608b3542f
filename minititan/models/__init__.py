"""Model families: plain PyTorch modules that know nothing of parallelism, configuration or training.

`decoder.py` is the one decoder with the one forward; a family is a module with a table of variants. Nothing
here imports another part of the library.
"""
