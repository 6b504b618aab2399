"""Try a training at any scale on this machine: the trainer's own code in fake tensors."""
