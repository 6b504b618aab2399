"""The only HTTP entry to Triton: OpenAI's interface to its models, and KServe's."""
