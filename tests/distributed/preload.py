"""What the fork server imports once, so that a rank starts in a fraction of a second.

`torch._dynamo` and the pipeline schedules too: drawing on the meta device, FSDP, the optimizers and pipelines
import them at their first use, which costs each process a second or two.
"""

import torch._dynamo
import torch.distributed.pipelining  # noqa: F401

import minititan.train  # noqa: F401
