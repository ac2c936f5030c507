"""The round, ragged batches, `generate`, streaming and traces."""
