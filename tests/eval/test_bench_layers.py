import pytest
import torch

from eval.bench_layers import Args, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark would run")
def test_says_that_it_needs_a_device() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        main(Args())
