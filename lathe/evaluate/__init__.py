"""How good a model is: cloze accuracy, perplexity, latency, and the gate before deployment."""
