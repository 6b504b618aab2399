"""The report of a run: the summary table, charts, and one self-contained HTML page."""
