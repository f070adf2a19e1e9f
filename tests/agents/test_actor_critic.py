from collections.abc import Iterator
from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn

from agents.actor_critic import ActorCritic
from hlem_env.errors import ArgumentError


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small only lose by more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("n_features", "parameters"), [(7, 18_696), (8, 18_824)])
def test_size(n_features: int, parameters: int) -> None:
    network = ActorCritic(n_features)
    assert sum(p.numel() for p in network.parameters()) == parameters < 25_000
    assert all(p.dtype == torch.float32 for p in network.parameters())


@pytest.mark.parametrize("batch", [(), (1,), (5,), (4, 3)])
def test_shapes(batch: tuple[int, ...]) -> None:
    network = ActorCritic(8, 5)
    obs = torch.rand(*batch, 8, generator=torch.Generator().manual_seed(1))
    sampled = network.act(obs, torch.Generator().manual_seed(0))
    assert network.logits(obs).shape == (*batch, 5)
    assert network.value(obs).shape == batch
    assert network.act(obs).shape == sampled.shape == batch
    assert network.act(obs).dtype == sampled.dtype == torch.int64
    assert torch.equal(network.act(obs), network.logits(obs).argmax(-1))


@pytest.mark.parametrize(("part", "head_gain"), [("actor", 0.01), ("critic", 1.0)])
def test_initial_weights_are_orthogonal_with_their_gain(part: str, head_gain: float) -> None:
    layers = [layer for layer in getattr(ActorCritic(7), part) if isinstance(layer, nn.Linear)]
    for layer, gain in zip(layers, (sqrt(2), sqrt(2), head_gain), strict=True):
        singular = torch.linalg.svdvals(layer.weight.detach())
        torch.testing.assert_close(singular, torch.full_like(singular, gain))
        assert not layer.bias.any()


def test_actor_and_critic_share_nothing() -> None:
    network = ActorCritic(7)
    obs = torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    network.logits(obs).sum().backward()
    assert all(p.grad is None for p in network.critic.parameters())
    assert all(p.grad is not None for p in network.actor.parameters())


def test_one_seed_gives_one_network_and_global_state_is_untouched() -> None:
    before = torch.get_rng_state()
    one, same, other = (
        ActorCritic(7, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
    )
    one.act(torch.zeros(7), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in n.parameters()]) for n in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_samples_follow_the_softmax() -> None:
    network = ActorCritic(7)
    with torch.no_grad():
        network.actor[-1].bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -2.0, 0.0]))
    obs = torch.zeros(20_000, 7)
    actions = network.act(obs, torch.Generator().manual_seed(0))
    shares = torch.bincount(actions, minlength=7) / len(obs)
    expected = network.logits(torch.zeros(7)).softmax(-1).detach()
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.015)


def test_actor_weights_round_trip() -> None:
    one = ActorCritic(7, generator=torch.Generator().manual_seed(1))
    two = ActorCritic(7, generator=torch.Generator().manual_seed(2))
    critic = [p.clone() for p in two.critic.parameters()]
    weights = one.actor_weights()
    two.load_actor_weights(weights)
    obs = torch.rand(9, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one.logits(obs), two.logits(obs))
    assert all(torch.equal(a, b) for a, b in zip(critic, two.critic.parameters(), strict=True))
    # Copies: training goes on without changing what was exported.
    with torch.no_grad():
        one.actor[0].weight.zero_()
    assert weights["layers.0.weight"].any()


def test_exported_weights_take_the_state_as_it_is() -> None:
    rng = np.random.default_rng(0)
    states = (rng.random((500, 7)) * rng.random(7) + rng.random(7)).astype(np.float32)
    network = ActorCritic(7)
    raw = network.logits(torch.from_numpy(states))
    network.standardise(states)
    seen = (torch.from_numpy(states) - network.center) * network.stretch
    assert seen.mean(0).abs().max() < 1e-4
    assert (seen.std(0) <= 1.01).all()
    assert (seen.std(0)[torch.from_numpy(states.std(0) > 0.06)] > 0.99).all()
    logits = network.logits(torch.from_numpy(states))
    assert not torch.allclose(raw, logits, atol=1e-4)
    exported = ActorCritic(7, generator=torch.Generator().manual_seed(3))
    exported.load_actor_weights(network.actor_weights())
    torch.testing.assert_close(exported.logits(torch.from_numpy(states)), logits, atol=1e-5, rtol=0)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"layers\.0\.weight"):
        ActorCritic(8).load_actor_weights(ActorCritic(7).actor_weights())
    with pytest.raises(ArgumentError, match="n_features=0"):
        ActorCritic(0)
    with pytest.raises(ArgumentError, match="n_actions=0"):
        ActorCritic(7, 0)


def test_parity_vectors_are_what_torch_says() -> None:
    network = ActorCritic(8)
    inputs, logits = network.parity_vectors(np.random.default_rng(0), 40)
    assert inputs.shape == (40, 8) and logits.shape == (40, 7)
    assert inputs.dtype == logits.dtype == np.float32
    assert inputs.min() >= 0 and inputs.max() <= 1
    np.testing.assert_array_equal(logits, network.logits(torch.from_numpy(inputs)).detach().numpy())
