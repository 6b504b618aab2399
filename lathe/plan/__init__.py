"""Try a training of any scale on this machine: the trainer's own code with fake tensors."""
