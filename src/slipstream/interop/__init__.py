"""Public checkpoint formats in and out, and checks against serving engines."""
