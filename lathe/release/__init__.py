"""Releases: rehearsal, publication, acceptance, comparison with production, rollback; training
certificates."""
