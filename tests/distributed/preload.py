"""What the fork server imports once, so that a rank starts in a fraction of a second.

`torch._dynamo` too: FSDP and the optimizers import it at their first use, which costs each process a second.
"""

import minititan.train  # noqa: F401
