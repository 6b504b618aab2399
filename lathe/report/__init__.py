"""What a run came to: the summary table, pictures, and one self-contained HTML page."""
