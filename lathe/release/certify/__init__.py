"""Proofs by repetition: killed and resumed training, and rebuilt steps."""
