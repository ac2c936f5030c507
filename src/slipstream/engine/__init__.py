"""Sessions, ragged batches, `generate`, streaming and traces."""
