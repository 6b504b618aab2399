"""Lets trials fork from a process that has run other tests."""

import torch

# The first backward pass of a process starts autograd's threads, one for each device; after that,
# its forks cannot run a backward pass. The CPU needs no thread, but fake tensors pretend that there
# is a GPU: if a test makes some before the first backward pass, trials fail in all tests that come
# after it in that process. So the first is here. Where there is a GPU, it would start a thread.
if torch.cuda.device_count() == 0:
    torch.ones(1, requires_grad=True).backward()  # type: ignore[no-untyped-call]
