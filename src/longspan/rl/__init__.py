"""Reinforcement learning: rollouts, rewards and the loop of `longspan rl`."""
