"""What runs on every row or token: a reference in PyTorch, and Triton for CUDA, of each."""
