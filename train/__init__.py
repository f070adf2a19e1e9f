"""Training scripts, one file each, run as ``python -m train.NAME``."""
