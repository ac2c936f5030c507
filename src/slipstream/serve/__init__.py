"""A server that speaks OpenAI's protocol over one engine."""
