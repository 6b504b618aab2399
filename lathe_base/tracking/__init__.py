"""Reports runs and releases to external services, if they are configured."""
