"""Kubeflow pipelines of Lathe's components, and how to compile and run them."""
