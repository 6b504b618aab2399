"""Translates the flags of Megatron-LM's and Megatron-DeepSpeed's `pretrain_gpt.py` to a recipe."""
