"""Requests, the engine that answers them, `generate`, streaming and traces."""
