"""Training of ad-prediction models when some features are public and the rest, with the label, are protected."""
