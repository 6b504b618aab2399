"""Runs on this machine: Kubeflow's local runner, with a cache that knows what each step read."""
