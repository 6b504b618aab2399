"""The Kubeflow components: typed inputs and outputs around calls of lathe."""
