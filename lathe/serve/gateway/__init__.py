"""The only HTTP door to Triton: OpenAI's interface to its models, and KServe's."""
