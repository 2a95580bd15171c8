"""Counter-based sampling noise: a pure function of (sample key, position, token), without a generator's state.

A sample gets the same noise in any batch, on any rank or device, and in a resumed run. The random bits are equal on
every device; the two logarithms that make them Gumbel-distributed may differ in the last bit between CPU and GPU.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["GOLDEN_64", "engine_seed", "gumbel_noise", "mix_64", "sample_key"]

# 2^64 / golden ratio: maps neighbouring positions far apart before they are mixed.
GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32


def sample_key(seed: int, step: int, uid: str, sample_index: int) -> int:
    """Return the signed 64-bit key of one sample, a hash of run seed, training step, prompt id and sample index."""
    identity = f"{int(seed)}/{int(step)}/{int(sample_index)}/{uid}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little", signed=True)


def engine_seed(key: int, generated: int) -> int:
    """Return the seed of a call of a third-party engine, whose noise restarts with each call.

    `generated`: tokens of the response so far, so that a resumed response gets new noise.
    """
    return (key + generated * 0x9E3779B97F4A7C15) % (2**63 - 1)


def gumbel_noise(keys: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Independent standard Gumbel noise, float32: `keys` [batch] int64, `positions` [batch] int64 → [batch, vocab].

    argmax over (log-probability + noise) is an exact sample (Gumbel-max). 31 random bits per token reach noise up to
    22.2, so tokens down to a probability of about 1e-10 can be drawn.
    """
    streams = mix_64(keys ^ mix_64(positions * GOLDEN_64))
    low = _as_int32(streams).unsqueeze(1)
    high = _as_int32(streams >> 32).unsqueeze(1)
    tokens = torch.arange(vocab, dtype=torch.int32, device=keys.device) * _GOLDEN_32
    bits = _mix_32_(tokens ^ low)
    bits = _mix_32_(bits.add_(high))
    # Small integers are exact in float32, so uniforms near 0, which become large noise, have full resolution.
    uniform = bits.bitwise_and_(2**31 - 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def mix_64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on wrapping int64."""
    x = (x ^ _logical_shift(x, 30, 64)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _logical_shift(x, 27, 64)) * (0x94D049BB133111EB - 2**64)
    return x ^ _logical_shift(x, 31, 64)


def _mix_32_(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby) on wrapping int32, in place."""
    x.bitwise_xor_(_logical_shift(x, 16, 32)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_(_logical_shift(x, 13, 32)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_(_logical_shift(x, 16, 32))


def _logical_shift(x: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """`>>` that fills with zeros; torch's copies the sign."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _as_int32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits, kept as a bit pattern."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
