"""Runs on a cluster: submit, schedule, follow, resume and compare them, and check the cluster."""
