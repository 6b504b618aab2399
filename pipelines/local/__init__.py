"""Runs on this machine: KFP's local runner, with a cache keyed by what each step reads."""
