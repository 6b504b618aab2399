"""TrainJobs and Deployments: the only importer of the Kubernetes client."""
