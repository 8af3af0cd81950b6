"""The two phases: label DP on the public features, DP-SGD on all of them."""
