"""Model quality: cloze accuracy, perplexity, latency, and the gate before deployment."""
