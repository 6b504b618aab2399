"""Lets trials fork from a process that has run other tests."""

import torch

# The first backward pass of a process starts autograd's threads, one for each device; after that,
# its forks cannot run a backward pass. A fake tensor pretends that there is a GPU: if a test makes
# one before the first backward pass, the next test's trials fail. So this is the first. With a GPU,
# it would start the threads.
if torch.cuda.device_count() == 0:
    torch.ones(1, requires_grad=True).backward()  # type: ignore[no-untyped-call]
