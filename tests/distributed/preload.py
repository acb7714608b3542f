"""What the fork server imports once, so that a rank starts in a fraction of a second.

Only outside packages: our own modules are cheap, and each test process loads them fresh.
"""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint  # noqa: F401
