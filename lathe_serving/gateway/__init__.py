"""The only HTTP endpoint in front of Triton, with the OpenAI and KServe APIs."""
