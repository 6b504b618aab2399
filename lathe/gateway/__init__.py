"""OpenAI's HTTP interface to the models that Triton serves."""
