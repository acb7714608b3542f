"""Checkpoints: the tensors of a run as Distributed Checkpoint (DCP) files, everything else as one JSON file.

`DUMP/checkpoint/step-N/` is written aside under a temporary name, synced to disk and renamed last, so a
folder with its final name is complete. Loading is strict, and checked before the first tensor is overwritten.
Parameters are saved under their names with their global shapes, so any layout can read what any other wrote.
`docs/checkpoints.md` describes the format.
"""
