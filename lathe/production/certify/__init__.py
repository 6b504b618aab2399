"""Proofs by repetition: trainings that are killed and resumed, and steps that are done again."""
