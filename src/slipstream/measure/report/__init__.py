"""report: runs as a page."""
