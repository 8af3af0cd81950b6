"""How good a model is: metrics, calibration, slices; and what it predicts for new rows."""
