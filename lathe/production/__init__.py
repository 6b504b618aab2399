"""Releases: rehearsal, publication, acceptance, challenge, rollback; certificates of trainings."""
