"""The report of a run: the summary table, pictures, and one self-contained HTML page."""
