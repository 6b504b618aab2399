"""Building blocks of the pipelines: steps, groups of steps, and the resources that they request."""
