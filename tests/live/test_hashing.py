import torch

from hlem_env.live.hashing import mix


def test_the_hash_has_splitmix64s_published_values() -> None:
    # The first outputs of SplitMix64 seeded with 0 are those of states 0, 1 and 2 times its constant.
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([0, golden - 2**64, 2 * golden % 2**64])
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in mix(states).tolist()] == expected
