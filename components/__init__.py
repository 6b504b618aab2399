"""The Kubeflow interface of every stage: typed inputs and outputs round a call of lathe."""
