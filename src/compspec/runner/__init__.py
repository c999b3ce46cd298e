"""Runs the model: `query_len` rows for each request, in static shapes. Knows nothing of speculation."""
