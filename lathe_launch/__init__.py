"""Worker processes, on this machine and, in `cluster`, on Kubernetes."""
