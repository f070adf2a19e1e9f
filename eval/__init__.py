"""Evaluation scripts that make a table or a figure, and the records behind them."""
