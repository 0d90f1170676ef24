"""Pretrained models: their weights, what their attention sees, and how good the chosen rows are."""
