"""Raw logs in, encoded store out."""
