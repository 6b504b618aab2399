"""From the pipelines' Python to what Kubeflow reads: their IR YAML, the machines of their steps,
and the digests of the code behind each step."""
