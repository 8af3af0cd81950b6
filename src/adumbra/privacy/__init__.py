"""What may be released, and what it costs. Knows nothing of models or of files of data."""
