"""Certificates of what a training does when its processes are killed."""

from lathe.certify.resume import certify_resume

__all__ = ["certify_resume"]
